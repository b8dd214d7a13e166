"""The timeline of one step, from `jax.profiler`: a lane for each device, a span for what it did."""

import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.profiler import ProfileData, ProfileOptions

from compare.contract.observers import Observer
from compare.contract.record import Recorder
from compare.contract.timeline import Kind, Lane, Span, Timeline, profiled_step
from compare.spec.experiment import Experiment
from jaxpar.measure.hlo import collectives
from jaxpar.measure.ledger import key_of
from jaxpar.measure.merging import merged
from jaxpar.measure.nesting import CONTROL, NestedInstruction, Turns, places
from jaxpar.measure.profile_events import Execution, Executions, read_events
from jaxpar.measure.turns_of_work import Schedule, TurnWork, make_turns
from jaxpar.state import Run

METHOD = (
    "jax.profiler: XLA's own marks when an instruction begins and is over, on each device. Forward, backward "
    "and update are told by the operation of JAX that an instruction was made of, of a fusion by its last; "
    "what has no derivative, or is XLA's own, counts to what was before it on that device. A collective "
    "begins when its device has come to it. Spans of a kind that follow each other within {gap:.0f} us are "
    "one."
)
WAITED = " Of the time in collectives {share:.0%} passed until the last device had come."
NONE_INSTRUMENTED = -1  # memory and ledger are read from the compiled step, and cost none of its time
NO_LOOP = " XLA has left no loop over microbatches: of which one a span is cannot be told."


class StepProfiler(Observer):
    """Watches one step, and writes timeline.json.

    Args:
        run: the training.
        recorder: writes.
    """

    def __init__(self, run: Run, recorder: Recorder):
        self._run, self._recorder = run, recorder
        first, steps = run.request.first_step, run.request.steps
        self.watched = profiled_step(first, steps, NONE_INSTRUMENTED)

    @contextmanager
    def watch(self) -> Generator[None]:
        """The step is waited for inside."""
        hlo, request = self._run.program(self.watched).as_text(), self._run.request
        assert hlo, "XLA keeps no text of the compiled step"
        with recorded(hlo, self._run.devices) as found:
            yield
        engine, experiment = request.engine, request.experiment
        self._recorder.timeline(
            make_timeline(found[0], hlo, engine=engine, experiment=experiment, step=self.watched)
        )


@contextmanager
def recorded(hlo: str, devices: list[jax.Device]) -> Generator[list[Executions]]:
    """A list that has, in the end, one item: what devices did of a module meanwhile.

    Args:
        hlo: `compiled.as_text()` of what runs, once, and is waited for inside.
        devices: of the mesh, in order.

    Raises:
        UnreadableProfileError: the profile does not tell.
    """
    options = ProfileOptions()
    options.python_tracer_level = 0  # every call of Python otherwise, for much time and no use
    found: list[Executions] = []
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            yield found
        (path,) = Path(folder).rglob("*.xplane.pb")
        profile = ProfileData.from_file(str(path))
    found.append(read_events(profile, hlo=hlo, devices=devices))


def make_timeline(
    executions: Executions, hlo: str, *, engine: str, experiment: Experiment, step: int
) -> Timeline:
    """The timeline of a run of a module.

    Args:
        executions: all of it.
        hlo: the module's text.
        engine, experiment: whose step it is, for the microbatches.
        step: its number.
    """
    events, layout = executions.events, experiment.layout
    reader = _Reader(events, hlo, layout.axes, make_turns(engine, experiment))
    begin, end = events[0].begin_us, max(event.end_us for event in events)
    by_device = [[event for event in events if event.device == device] for device in range(layout.devices)]
    lanes, gap = merged([reader.spans(own, begin) for own in by_device])
    return Timeline(
        step=step,
        wall_us=end - begin,
        lanes=[Lane(device=device, spans=spans) for device, spans in enumerate(lanes)],
        method=METHOD.format(gap=gap) + _waited(executions.waited_us, lanes) + reader.cannot_tell,
    )


def _waited(waited_us: float, lanes: list[list[Span]]) -> str:
    total = sum(span.duration_us for lane in lanes for span in lane if span.operation)
    return WAITED.format(share=waited_us / total) if waited_us and total else ""


class _Reader:
    """Makes spans of events."""

    def __init__(self, events: list[Execution], hlo: str, axis_sizes: Mapping[str, int], schedule: Schedule):
        self._places = places(hlo)
        self._schedule = schedule
        self._turns = Turns([event for event in events if event.name in self._places], self._places)
        self._of_loop: dict[str, set[Kind]] = {}
        for place in self._places.values():
            if kind := _by_autodiff(place):
                self._of_loop.setdefault(place.loop, set()).add(kind)
        found = {c.name: key_of(c, axis_sizes) for c in collectives(hlo, axis_sizes, problems=[])}
        self._collectives = {name: key for name, key in found.items() if key}
        tells = any(place.trips == schedule.turns for place in self._places.values())
        self.cannot_tell = "" if tells or not schedule.turns else NO_LOOP

    def spans(self, events: list[Execution], origin: float) -> list[Span]:
        """One for each instruction of a device that does something by itself; the earliest first."""
        events = [event for event in events if self._places.get(event.name, CONTROLS).opcode not in CONTROL]
        backward = [e.begin_us for e in events if _by_autodiff(self._places[e.name]) == "backward"]
        found: list[Span] = []
        before, microbatch = "forward", -1
        for event in events:
            place = self._places[event.name]
            work = self._work(event, place)
            if work.microbatch not in (-1, microbatch):
                before, microbatch = "forward", work.microbatch
            kind = work.kind or self._kind(place, is_early=not backward or event.begin_us < backward[0])
            found.append(self._span(event, work, kind or before, origin))
            before = kind or before
        return found

    def _span(self, event: Execution, work: TurnWork, kind: Kind, origin: float) -> Span:
        of = "" if work.microbatch < 0 else f", microbatch {work.microbatch}"
        communicates = self._collectives.get(event.name)
        operation, axis, purpose = communicates or ("", "", "")
        return Span(
            kind="communication" if communicates else kind,
            name=(f"{operation} over {axis} for {purpose}" if communicates else kind) + of,
            begin_us=event.begin_us - origin,
            duration_us=event.end_us - event.begin_us,
            microbatch=work.microbatch,
            chunk=work.chunk,
            operation=operation,
            axis=axis,
            purpose=purpose,
        )

    def _work(self, event: Execution, place: NestedInstruction) -> TurnWork:
        turn = self._turns.of(event) if place.loop and place.trips == self._schedule.turns else -1
        if turn < 0:
            return TurnWork()
        return self._schedule.work(event.device, turn, self._of_loop.get(place.loop) == {"backward"})

    def _kind(self, place: NestedInstruction, *, is_early: bool) -> Kind | None:
        """None if it may be forward or backward. What is early is before any backward."""
        if kind := _by_autodiff(place):
            return kind
        of_loop = self._of_loop.get(place.loop, set()) if place.loop else set()
        if len(of_loop) == 1:
            return next(iter(of_loop))
        if place.loop or not place.op_name:
            return None
        return "forward" if is_early else "update"


CONTROLS = NestedInstruction(CONTROL[0], "")
"""In place of an instruction that is not found, such as one of a loop's condition: it is left out, too."""


def _by_autodiff(place: NestedInstruction) -> Kind | None:
    """By its names for what it made; what backward computes anew is its own."""
    if "transpose(" in place.op_name:
        return "backward"
    return "forward" if "jvp(" in place.op_name else None
