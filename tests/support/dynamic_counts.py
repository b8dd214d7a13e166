"""How often collectives ran, by the profiler, against how often the ledger says that they do.

The ledger is read from the text of the program, which all devices share: what loops and branches make of an
instruction on each rank of a pipeline is worked out, and nobody has seen it run. Here each device is counted.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import numpy as np
from msgspec import Struct

from compare.spec.axes import PP
from jaxpar.measure.hlo import Collective, collectives
from jaxpar.measure.ledger import key_of
from jaxpar.measure.profile import Execution


class Counted(Struct, frozen=True, kw_only=True):
    """Collectives of a kind, axis and purpose in one step: a number for each device, in the mesh's order."""

    kind: str
    axis: str
    purpose: str
    static: list[int]
    """Calls, as the ledger reads them."""
    dynamic: list[int]
    """What the profiler saw."""
    differences: list[str]
    """Instructions whose two counts differ, a line each."""


def dynamic_counts(events: Iterable[Execution], hlo: str, axis_sizes: Mapping[str, int]) -> list[Counted]:
    """A row for each kind, axis and purpose.

    Args:
        events: all of one run of the module.
        hlo: its text, with the names and the static counts.
        axis_sizes: mesh axes with their sizes, in the order of the mesh.
    """
    ran = Counter((event.name, event.device) for event in events)
    stages = _stages(axis_sizes)
    by_key: dict[tuple[str, str, str], list[Collective]] = defaultdict(list)
    for collective in collectives(hlo, axis_sizes):
        if key := key_of(collective, axis_sizes):
            by_key[key].append(collective)
    return [_row(key, found, ran, stages) for key, found in sorted(by_key.items())]


def _row(
    key: tuple[str, str, str], found: list[Collective], ran: Counter[tuple[str, int]], stages: list[int]
) -> Counted:
    static: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(len(stages), int))
    for collective in found:  # of one name there may be several: a computation may be called twice
        static[collective.name] += [collective.calls_at(stage) for stage in stages]
    dynamic = {name: np.array([ran[name, device] for device in range(len(stages))]) for name in static}
    kind, axis, purpose = key
    return Counted(
        kind=kind,
        axis=axis,
        purpose=purpose,
        static=np.sum(list(static.values()), axis=0).tolist(),
        dynamic=np.sum(list(dynamic.values()), axis=0).tolist(),
        differences=[
            f"{name}: {dynamic[name].tolist()} times, and not {static[name].tolist()}"
            for name in static
            if (dynamic[name] != static[name]).any()
        ],
    )


def _stages(axis_sizes: Mapping[str, int]) -> list[int]:
    """The place along the pipeline of each device."""
    if PP not in axis_sizes:
        return [0] * int(np.prod(list(axis_sizes.values())))
    return np.indices(tuple(axis_sizes.values()))[list(axis_sizes).index(PP)].ravel().tolist()
