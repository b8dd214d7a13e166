"""How often collectives ran, by the profiler, against how often the ledger says that they do.

The ledger is read from the text of the program, which all devices share; what runs in a branch that only one
end of a pipeline takes runs on the devices of that end. So an instruction's count is compared with the device
on which it ran most.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from msgspec import Struct

from jaxpar.measure.hlo import collectives
from jaxpar.measure.ledger import key_of
from jaxpar.measure.profile_events import Event


class Counted(Struct, frozen=True, kw_only=True):
    """Collectives of a kind, axis and purpose in one step."""

    kind: str
    axis: str
    purpose: str
    static: int
    """Calls, as in the ledger."""
    dynamic: int
    """What the profiler saw: of each instruction the count of the device on which it ran most, summed."""
    by_device: list[int]
    """What it saw on each device, in the order of the mesh."""
    differences: list[str]
    """Instructions whose two counts differ, a line each."""


def dynamic_counts(
    events: Iterable[Event], hlo: str, axis_sizes: Mapping[str, int], *, devices: int
) -> list[Counted]:
    """A row for each kind, axis and purpose.

    Args:
        events: all of one run of the module.
        hlo: its text, with the names and the static counts.
        axis_sizes: mesh axes with their sizes, in the order of the mesh.
        devices: how many ran it.
    """
    ran = Counter((event.device, event.name) for event in events)
    static: dict[tuple[str, str, str], Counter[str]] = {}
    for collective in collectives(hlo, axis_sizes):
        if key := key_of(collective, axis_sizes):
            static.setdefault(key, Counter())[collective.name] += collective.calls
    return [_row(key, calls, ran, devices) for key, calls in sorted(static.items())]


def _row(
    key: tuple[str, str, str], calls: Counter[str], ran: Counter[tuple[int, str]], devices: int
) -> Counted:
    kind, axis, purpose = key
    most = {name: max(ran[device, name] for device in range(devices)) for name in calls}
    return Counted(
        kind=kind,
        axis=axis,
        purpose=purpose,
        static=calls.total(),
        dynamic=sum(most.values()),
        by_device=[sum(ran[device, name] for name in calls) for device in range(devices)],
        differences=[
            f"{name}: {most[name]} times, and not {expected} times"
            for name, expected in calls.items()
            if most[name] != expected
        ],
    )
