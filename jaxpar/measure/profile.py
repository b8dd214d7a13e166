"""The timeline of one step, from `jax.profiler`: a lane for each device, a span for what it did.

The profiler's own files stay beside it: trace.json.gz opens in Perfetto, trace.xplane.pb in XProf.

XLA on a CPU marks each instruction, a "thunk", when a thread begins it, with its name and its module, the run
and the device (`hlo_op`, `hlo_module`, `device_ordinal`). The mark ends when the thread goes on, which may be
before the work is done: that goes to a pool. A second mark, `end: NAME`, tells when it is; it has the first
one's number (`_p` there, `_c` here). A thread is no device: all of them share a pool. Inside of a collective,
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
from compare.contract.timeline import Kind, Lane, Span, Timeline, profiled_step
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
"""Run other instructions, which have times of their own."""
_GPU_PLANE = re.compile(r"^/device:GPU:(\d+)")
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


class StepProfiler(Observer):
    """Watches one step, and writes timeline.json."""

    def __init__(self, run: Run, recorder: Recorder):
        self._run, self._recorder = run, recorder
        self.watched = profiled_step(run.request.first_step, run.request.steps, NONE_INSTRUMENTED)

    @contextmanager
    def watch(self) -> Generator[None]:
        """The step is waited for inside."""
        hlo = self._run.program(self.watched).as_text()
        assert hlo, "XLA keeps no text of the compiled step"
        with recorded(hlo, self._run.devices, folder=self._recorder.folder) as found:
            yield
        self._recorder.timeline(make_timeline(found[0], hlo, self._run.experiment.layout.axes, self.watched))


@contextmanager
def recorded(
    hlo: str, devices: list[jax.Device], *, folder: Path | None = None
) -> Generator[list[Executions]]:
    """A list that has, in the end, one item: what devices did of a module meanwhile.

    It runs once, and is waited for inside. The profiler's own files stay in `folder`. Raises
    UnreadableProfileError: the profile does not tell.
    """
    options = ProfileOptions()
    options.python_tracer_level = 0  # every call of Python otherwise, for much time and no use
    found: list[Executions] = []
    with tempfile.TemporaryDirectory(prefix="profile-", dir=folder) as temporary:
        with jax.profiler.trace(temporary, profiler_options=options):
            yield found
        (path,) = Path(temporary).rglob("*.xplane.pb")
        profile = ProfileData.from_file(str(path))
        if folder:
            path.replace(folder / "trace.xplane.pb")
            for trace in Path(temporary).rglob("*.trace.json.gz"):
                trace.replace(folder / "trace.json.gz")
    found.append(read_events(profile, hlo=hlo, devices=devices))


def read_events(profile: ProfileData, *, hlo: str, devices: list[jax.Device]) -> Executions:
    """Every execution of an instruction of a module; devices are in the order of the mesh.

    Raises UnreadableProfileError: nothing of the module is in the profile, or not on which device it ran.
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
    waited = sum(event.duration_ns for event in _all(profile) if event.name.startswith("Wait: pending_th"))
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
        lines = [line for line in plane.lines if line.name.startswith("Stream")] if of_device else []
        for event in (event for line in lines for event in line.events):
            stats = dict(event.stats)
            if of_device and "hlo_op" in stats and stats.get("hlo_module") == module:
                yield int(of_device[1]), str(stats["hlo_op"]), event.start_ns / 1e3, event.end_ns / 1e3


def make_timeline(executions: Executions, hlo: str, axis_sizes: Mapping[str, int], step: int) -> Timeline:
    """The timeline of one run of a module: all of its executions, its text, the axes in the mesh's order."""
    events, operations = executions.events, dict(_operations(hlo))
    sent = {c.name: key_of(c, axis_sizes) for c in collectives(hlo, axis_sizes, problems=[])}
    begin, end = events[0].begin_us, max(event.end_us for event in events)
    lanes = []
    for device in sorted({event.device for event in events}):
        # Of a loop's condition nothing is known: its instructions are left out, as what runs others is.
        own = [event for event in events if event.device == device and event.name in operations]
        lanes.append(Lane(device=device, spans=_merged(_spans(own, operations, sent, begin))))
    total = sum(span.duration_us for lane in lanes for span in lane.spans if span.operation)
    waited = WAITED.format(share=executions.waited_us / total) if executions.waited_us and total else ""
    return Timeline(step=step, wall_us=end - begin, lanes=lanes, method=METHOD + waited)


def _operations(hlo: str) -> Iterator[tuple[str, tuple[str, bool]]]:
    """Each instruction that does something by itself: its name, its operation of JAX, whether in a loop."""
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
    operations: dict[str, tuple[str, bool]],
    sent: Mapping[str, tuple[str, str, str] | None],
    origin: float,
) -> Iterator[Span]:
    """One for each instruction of a device; the earliest first."""
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
        key = sent.get(event.name)
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
