"""Executions of a module's instructions, read from a profile of `jax.profiler`.

XLA on a CPU marks each instruction, a "thunk", when a thread begins it, with its name and its module, the
run and the device (`hlo_op`, `hlo_module`, `run_id`, `device_ordinal`). The mark ends when the thread goes
on, which may be before the work is done: that goes to a pool. A second mark, `end: NAME`, tells when it is;
it has the first one's number (`_p` there, `_c` here). A thread is no device: all of them share a pool. Inside
of a collective, `Wait: pending_threads=1/2` lasts until the last device has come. On a GPU a plane is a
device, and its lines are streams.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

_GPU_PLANE = re.compile(r"^/device:GPU:(\d+)")
_STREAM = "Stream"
_WAIT = "Wait: pending_threads"
_MODULE = re.compile(r"^HloModule ([\w.\-]+)")


class Execution(NamedTuple):
    """One execution of an instruction on a device."""

    device: int
    """Position in the order of the mesh."""
    name: str
    """Name of the instruction."""
    begin_us: float
    end_us: float


class Executions(NamedTuple):
    """Executions of a module's instructions on the devices."""

    events: list[Execution]
    """The earliest first."""
    waited_us: float
    """Waiting in collectives for the last device (microseconds), summed over the devices as far as known."""


class UnreadableProfileError(RuntimeError):
    """A profile that does not tell which device did what."""


def read_events(profile: ProfileData, *, hlo: str, devices: list[jax.Device]) -> Executions:
    """Every execution of an instruction of a module.

    Args:
        profile: of any length.
        hlo: the module's text.
        devices: in the order of the mesh.

    Raises:
        UnreadableProfileError: nothing of the module is in the profile, or not on which device it ran.
    """
    module = _MODULE.match(hlo)
    assert module, "a module has a name"
    order = {device.local_hardware_id: position for position, device in enumerate(devices)}
    read = _on_gpus if devices[0].platform != "cpu" else _on_cpu
    found = [
        Execution(order[ordinal], name, begin_us, end_us)
        for ordinal, name, begin_us, end_us in read(profile, module[1])
        if ordinal in order
    ]
    if {event.device for event in found} != set(range(len(devices))):
        raise UnreadableProfileError(
            f"the profile has {len(found)} executions of instructions of {module[1]}, and not on each of "
            f"{len(devices)} devices"
        )
    waited = sum(event.duration_ns for event in _all(profile) if event.name.startswith(_WAIT))
    return Executions(sorted(found, key=lambda event: event.begin_us), waited / 1e3)


def _all(profile: ProfileData) -> Iterator[Any]:
    return (event for plane in profile.planes for line in plane.lines for event in line.events)


_Row = tuple[int, str, float, float]


def _on_cpu(profile: ProfileData, module: str) -> Iterator[_Row]:
    begun: list[tuple[_Row, Any]] = []
    ended: dict[Any, float] = {}
    for event in _all(profile):
        stats = dict(event.stats)
        if "hlo_op" in stats and stats.get("hlo_module") == module:
            ordinal = int(stats.get("device_ordinal", -1))
            row = ordinal, str(stats["hlo_op"]), event.start_ns / 1e3, event.end_ns / 1e3
            begun.append((row, stats.get("_p")))
        elif event.name.startswith("end: "):
            ended[stats.get("_c")] = event.start_ns / 1e3
    for (ordinal, name, begin_us, end_us), context in begun:
        yield ordinal, name, begin_us, max(end_us, ended.get(context, end_us))


def _on_gpus(profile: ProfileData, module: str) -> Iterator[_Row]:
    for plane in profile.planes:
        of_device = _GPU_PLANE.match(plane.name)
        # Other lines of the plane (XLA Ops, XLA Modules) repeat what its streams have.
        lines = [line for line in plane.lines if line.name.startswith(_STREAM)] if of_device else []
        for event in (event for line in lines for event in line.events):
            stats = dict(event.stats)
            if of_device and "hlo_op" in stats and stats.get("hlo_module") == module:
                yield int(of_device[1]), str(stats["hlo_op"]), event.start_ns / 1e3, event.end_ns / 1e3
