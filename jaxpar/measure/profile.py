"""The timeline of one step, from `jax.profiler`: a lane for each device, a span for each stretch of work.

On a CPU, XLA writes an event when a thread begins an instruction: the instruction (`hlo_op`), its module and
its device. The work may outlast the event. Then a second event, `end: NAME`, has the time of the end. Its
`_c` is the `_p` of the first event. On a GPU a plane is a device, and its lines are streams.
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

from compare.contract.record import Recorder
from compare.contract.timeline import TRACES, Kind, Lane, Span, Timeline, profiled_step
from compare.side.recording import Observer
from jaxpar.measure.hlo import OP_NAME, called_by, computations, opcode_of
from jaxpar.measure.hlo_collectives import collectives
from jaxpar.measure.ledger import key_of
from jaxpar.run import Run

GAP_US = 10.0
METHOD = (
    "jax.profiler: XLA's marks when an instruction begins and is over, on each device. The operation of JAX "
    "that it was made of shows forward, backward and update; without one it counts to the work before it. A "
    f"collective begins when its device has come to it. Spans of a kind within {GAP_US:.0f} us are one."
)
CONTROL = ("while", "conditional", "call", "async-start", "async-done")
"""Instructions that run other instructions, which have their own times."""
_GPU_PLANE = re.compile(r"^/device:GPU:(\d+)")
_MODULE = re.compile(r"^HloModule ([\w.\-]+)")


class Execution(NamedTuple):
    """One execution of an instruction on a device."""

    device: int
    """Position in the order of the mesh."""
    name: str
    begin_us: float
    end_us: float


class StepProfiler(Observer):
    """Profile one step, and write timeline.json."""

    def __init__(self, run: Run, recorder: Recorder):
        self._run, self._recorder = run, recorder
        none = -1  # memory and ledger are read from the compiled step, and cost none of its time
        self.watched = profiled_step(run.request.first_step, run.request.steps, none)

    @contextmanager
    def watch(self) -> Generator[None]:
        """Profile the step that runs and is waited for inside."""
        hlo = self._run.train_program.as_text()
        assert hlo, "XLA keeps no text of the compiled step"
        with recorded(hlo, self._run.devices, folder=self._recorder.folder) as events:
            yield
        axes = self._run.experiment.layout.axes
        self._recorder.leave(make_timeline(events, hlo, axes, self.watched))


@contextmanager
def recorded(
    hlo: str, devices: list[jax.Device], *, folder: Path | None = None
) -> Generator[list[Execution]]:
    """A list that contains, after the context, the `read_events` of a module that ran once inside.

    The profiler's files stay in `folder`: trace.json.gz opens in Perfetto, trace.xplane.pb in XProf.
    """
    options = ProfileOptions()
    options.python_tracer_level = 0  # do not trace Python's calls
    events: list[Execution] = []
    with tempfile.TemporaryDirectory(prefix="profile-", dir=folder) as temporary:
        with jax.profiler.trace(temporary, profiler_options=options):
            yield events
        (path,) = Path(temporary).rglob("*.xplane.pb")
        profile = ProfileData.from_file(str(path))
        if folder:
            for name in TRACES:
                (path,) = Path(temporary).rglob(f"*.{name.removeprefix('trace.')}")
                path.replace(folder / name)
    events += read_events(profile, hlo=hlo, devices=devices)


def read_events(profile: ProfileData, *, hlo: str, devices: list[jax.Device]) -> list[Execution]:
    """Executions of a module's instructions, in order of time; devices are in the order of the mesh.

    Raises ValueError: the module did not run, or the profile lacks one of the devices.
    """
    module = _MODULE.match(hlo)
    assert module, "a module has a name"
    position = {device.local_hardware_id: number for number, device in enumerate(devices)}
    begun: list[tuple[Execution, Any]] = []
    ended: dict[Any, float] = {}
    for of_gpu, event in _events(profile, on_gpus=devices[0].platform != "cpu"):
        stats, begin_us = dict(event.stats), event.start_ns / 1e3
        device = position.get(int(of_gpu[1] if of_gpu else stats.get("device_ordinal", -1)))
        if event.name.startswith("end: ") and "_c" in stats:
            ended[stats["_c"]] = begin_us
        elif "hlo_op" in stats and stats.get("hlo_module") == module[1] and device is not None:
            execution = Execution(device, str(stats["hlo_op"]), begin_us, event.end_ns / 1e3)
            begun.append((execution, stats.get("_p")))
    events = [e._replace(end_us=max(e.end_us, ended.get(number, e.end_us))) for e, number in begun]
    if {event.device for event in events} != set(range(len(devices))):
        raise ValueError(
            f"the profile has {len(events)} executions of instructions of {module[1]}, and not on each of "
            f"{len(devices)} devices"
        )
    return sorted(events, key=lambda event: event.begin_us)


def _events(profile: ProfileData, *, on_gpus: bool) -> Iterator[tuple[re.Match[str] | None, Any]]:
    """Events, with the match of the GPU of their plane; None on a CPU."""
    for plane in profile.planes:
        of_gpu = _GPU_PLANE.match(plane.name)
        for line in plane.lines:
            # Other lines of a GPU's plane (XLA Ops, XLA Modules) repeat the events of its streams.
            if bool(of_gpu) == on_gpus and (not on_gpus or line.name.startswith("Stream")):
                yield from ((of_gpu, event) for event in line.events)


def make_timeline(events: list[Execution], hlo: str, axis_sizes: Mapping[str, int], step: int) -> Timeline:
    """The timeline of one run of a module from its text; axes are in the order of the mesh."""
    operations = dict(_operations(hlo))
    keys = {c.name: key_of(c, axis_sizes) for c in collectives(hlo, axis_sizes)}
    begin, end = events[0].begin_us, max(event.end_us for event in events)
    lanes = []
    for device in sorted({event.device for event in events}):
        # Skip instructions that run other instructions, and the condition of a loop.
        of_device = [event for event in events if event.device == device and event.name in operations]
        lanes.append(Lane(device=device, spans=_spans(of_device, operations, keys, begin)))
    return Timeline(step=step, wall_us=end - begin, lanes=lanes, method=METHOD)


def _operations(hlo: str) -> Iterator[tuple[str, tuple[str, bool]]]:
    """Instructions that run no other ones: name, operation of JAX, and True in a loop."""
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
) -> list[Span]:
    """Spans of a device's instructions. Neighbours of one kind are one span, except communications."""
    spans: list[Span] = []
    work: Kind = "forward"
    begins_backward = [e.begin_us for e in events if "transpose(" in operations[e.name][0]]
    for event in events:
        op_name, in_loop = operations[event.name]
        if "transpose(" in op_name:
            work = "backward"
        elif "jvp(" in op_name:
            work = "forward"
        elif op_name and not in_loop:
            work = "forward" if not begins_backward or event.begin_us < begins_backward[0] else "update"
        begin, end = event.begin_us - origin, event.end_us - origin
        last = spans[-1] if spans else None
        if key := keys.get(event.name):
            name = f"{key[0]} over {key[1]} for {key[2]}"
            kind, (operation, axis, purpose) = "communication", key
        elif last and last.kind == work and begin <= last.end_us + GAP_US:
            spans[-1] = replace(last, duration_us=max(last.end_us, end) - last.begin_us)
            continue
        else:
            name, kind, operation, axis, purpose = work, work, "", "", ""
        span = Span(kind=kind, name=name, begin_us=begin, duration_us=end - begin)
        spans.append(replace(span, operation=operation, axis=axis, purpose=purpose))
    return spans
