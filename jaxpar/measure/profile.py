"""The timeline of one step, from `jax.profiler`: a lane for each device, a span for each stretch of work.

The profiler's own files stay beside it: trace.json.gz opens in Perfetto, trace.xplane.pb in XProf.

On a CPU, XLA marks each instruction when a thread begins it, with the instruction (`hlo_op`), its module and
its device. The work may outlast the mark: a second mark, `end: NAME`, says when it is over, and has the first
one's number (`_p` there, `_c` here). All devices share a pool of threads. In a collective,
`Wait: pending_threads=1/2` lasts until the last device has come. On a GPU a plane is a device, and its lines
are streams.
"""

import re
import tempfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData, ProfileOptions
from msgspec.structs import replace

from compare.contract.observers import Observer
from compare.contract.record import Recorder
from compare.contract.timeline import TRACES, Kind, Lane, Span, Timeline, profiled_step
from jaxpar.measure.hlo import OP_NAME, called_by, collectives, computations, opcode_of
from jaxpar.measure.ledger import key_of
from jaxpar.run import Run

GAP_US = 10.0
METHOD = (
    "jax.profiler: XLA's own marks when an instruction begins and is over, on each device. Forward, backward "
    "and update are told by the operation of JAX that an instruction was made of, of a fusion by its last; "
    "what has no derivative, or is XLA's own, counts to what was before it on that device. A collective "
    f"begins when its device has come to it. Spans of a kind that follow each other within {GAP_US:.0f} us "
    "are one."
)
WAITED = " Of the time in collectives {share:.0%} passed until the last device had come."
NONE_INSTRUMENTED = -1  # memory and ledger are read from the compiled step, and cost none of its time
CONTROL = ("while", "conditional", "call", "async-start", "async-done")
"""Instructions that run others, which have times of their own."""
_GPU_PLANE = re.compile(r"^/device:GPU:(\d+)")
_MODULE = re.compile(r"^HloModule ([\w.\-]+)")


class Execution(NamedTuple):
    """One execution of an instruction on a device."""

    device: int
    """Position in the order of the mesh."""
    name: str
    begin_us: float
    end_us: float


class Executions(NamedTuple):
    """Executions of a module's instructions on all devices."""

    events: list[Execution]
    """The earliest first."""
    waited_us: float
    """Waiting in collectives for the last device (microseconds), summed over devices; 0 if unknown."""


class UnreadableProfileError(RuntimeError):
    """A profile that does not tell which device ran which instruction."""


class StepProfiler(Observer):
    """Profiles one step, and writes timeline.json."""

    def __init__(self, run: Run, recorder: Recorder):
        self._run, self._recorder = run, recorder
        self.watched = profiled_step(run.request.first_step, run.request.steps, NONE_INSTRUMENTED)

    @contextmanager
    def watch(self) -> Generator[None]:
        """The step is waited for inside."""
        hlo = self._run.step.as_text()
        assert hlo, "XLA keeps no text of the compiled step"
        with recorded(hlo, self._run.mesh_devices, folder=self._recorder.folder) as profiles:
            yield
        axes = self._run.experiment.layout.axes
        self._recorder.timeline(make_timeline(profiles[0], hlo, axes, self.watched))


@contextmanager
def recorded(
    hlo: str, devices: list[jax.Device], *, folder: Path | None = None
) -> Generator[list[Executions]]:
    """A list to which the end of the context appends a module's `Executions`.

    The module runs once inside, and is waited for there. The profiler's own files stay in `folder`. Errors as
    of `read_events`.
    """
    options = ProfileOptions()
    options.python_tracer_level = 0  # every call of Python otherwise, for much time and no use
    profiles: list[Executions] = []
    with tempfile.TemporaryDirectory(prefix="profile-", dir=folder) as temporary:
        with jax.profiler.trace(temporary, profiler_options=options):
            yield profiles
        (path,) = Path(temporary).rglob("*.xplane.pb")
        profile = ProfileData.from_file(str(path))
        if folder:
            for name in TRACES:
                (path,) = Path(temporary).rglob(f"*.{name.removeprefix('trace.')}")
                path.replace(folder / name)
    profiles.append(read_events(profile, hlo=hlo, devices=devices))


def read_events(profile: ProfileData, *, hlo: str, devices: list[jax.Device]) -> Executions:
    """Every execution of an instruction of a module; devices are in the order of the mesh.

    Raises UnreadableProfileError: the module did not run, or the profile lacks one of the devices.
    """
    module = _MODULE.match(hlo)
    assert module, "a module has a name"
    position = {device.local_hardware_id: number for number, device in enumerate(devices)}
    read = _on_gpus if devices[0].platform != "cpu" else _on_cpu
    executions = [event for event in read(profile, module[1]) if event.device in position]
    events = [event._replace(device=position[event.device]) for event in executions]
    if {event.device for event in events} != set(range(len(devices))):
        raise UnreadableProfileError(
            f"the profile has {len(events)} executions of instructions of {module[1]}, and not on each of "
            f"{len(devices)} devices"
        )
    waits = (event for event in _events(profile) if event.name.startswith("Wait: pending_th"))
    waited_us = sum(event.duration_ns for event in waits) / 1e3
    return Executions(sorted(events, key=lambda event: event.begin_us), waited_us)


def _events(profile: ProfileData) -> Iterator[Any]:
    return (event for plane in profile.planes for line in plane.lines for event in line.events)


def _on_cpu(profile: ProfileData, module: str) -> Iterator[Execution]:
    """Executions by number of the device."""
    begun: list[tuple[Execution, Any]] = []
    ended: dict[Any, float] = {}
    for event in _events(profile):
        stats = dict(event.stats)
        if "hlo_op" in stats and stats.get("hlo_module") == module:
            execution = _execution(int(stats.get("device_ordinal", -1)), event, stats)
            begun.append((execution, stats.get("_p")))
        elif event.name.startswith("end: "):
            ended[stats.get("_c")] = event.start_ns / 1e3
    for execution, number in begun:
        yield execution._replace(end_us=max(execution.end_us, ended.get(number, execution.end_us)))


def _on_gpus(profile: ProfileData, module: str) -> Iterator[Execution]:
    """Executions by number of the device."""
    for plane in profile.planes:
        device = _GPU_PLANE.match(plane.name)
        # Other lines of the plane (XLA Ops, XLA Modules) repeat what its streams have.
        streams = [line for line in plane.lines if line.name.startswith("Stream")] if device else []
        for event in (event for line in streams for event in line.events):
            stats = dict(event.stats)
            if device and "hlo_op" in stats and stats.get("hlo_module") == module:
                yield _execution(int(device[1]), event, stats)


def _execution(device: int, event: Any, stats: Mapping[str, Any]) -> Execution:
    return Execution(device, str(stats["hlo_op"]), event.start_ns / 1e3, event.end_ns / 1e3)


def make_timeline(executions: Executions, hlo: str, axis_sizes: Mapping[str, int], step: int) -> Timeline:
    """The timeline of one run of a module, from its executions and its text; axes are in the mesh's order."""
    events, operations = executions.events, dict(_operations(hlo))
    keys = {c.name: key_of(c, axis_sizes) for c in collectives(hlo, axis_sizes, problems=[])}
    begin, end = events[0].begin_us, max(event.end_us for event in events)
    lanes = []
    for device in sorted({event.device for event in events}):
        # Instructions that run others are left out; so is a loop's condition, of which nothing is known.
        of_device = [event for event in events if event.device == device and event.name in operations]
        lanes.append(Lane(device=device, spans=_merged(_spans(of_device, operations, keys, begin))))
    total = sum(span.duration_us for lane in lanes for span in lane.spans if span.operation)
    waited = WAITED.format(share=executions.waited_us / total) if executions.waited_us and total else ""
    return Timeline(step=step, wall_us=end - begin, lanes=lanes, method=METHOD + waited)


def _operations(hlo: str) -> Iterator[tuple[str, tuple[str, bool]]]:
    """Instructions that run no others: name, operation of JAX, and whether it is in a loop."""
    bodies, entry = computations(hlo)

    def walk(computation: str, in_loop: bool) -> Iterator[tuple[str, tuple[str, bool]]]:
        for text in bodies[computation]:
            opcode, made_of = opcode_of(text), OP_NAME.search(text)
            if opcode not in CONTROL:
                yield text.partition(" ")[0], (made_of[1] if made_of else "", in_loop)
                continue
            for other in called_by(text):
                yield from walk(other, in_loop or opcode == "while")

    return walk(entry, False)


def _spans(
    events: list[Execution],
    operations: Mapping[str, tuple[str, bool]],
    keys: Mapping[str, tuple[str, str, str] | None],
    origin: float,
) -> Iterator[Span]:
    """A span for each instruction of a device; the earliest first."""
    kind: Kind = "forward"
    begins_backward = [e.begin_us for e in events if "transpose(" in operations[e.name][0]]
    for event in events:
        op_name, in_loop = operations[event.name]
        if "transpose(" in op_name:
            kind = "backward"
        elif "jvp(" in op_name:
            kind = "forward"
        elif op_name and not in_loop:
            kind = "forward" if not begins_backward or event.begin_us < begins_backward[0] else "update"
        key = keys.get(event.name)
        operation, axis, purpose = key or ("", "", "")
        yield Span(
            kind="communication" if key else kind,
            name=f"{operation} over {axis} for {purpose}" if key else kind,
            begin_us=event.begin_us - origin,
            duration_us=event.end_us - event.begin_us,
            operation=operation,
            axis=axis,
            purpose=purpose,
        )


def _merged(spans: Iterator[Span]) -> list[Span]:
    """Instructions that follow each other in the same work are one span; a communication parts them."""
    merged: list[Span] = []
    for span in spans:
        last = merged[-1] if merged else None
        if last and last.kind == span.kind != "communication" and span.begin_us <= last.end_us + GAP_US:
            end = max(last.end_us, span.end_us)
            merged[-1] = replace(last, duration_us=end - last.begin_us)
        else:
            merged.append(span)
    return merged
