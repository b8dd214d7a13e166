"""Marks in PyTorch's trace of a step: its phases, a pipeline's tasks, collectives, and where a rank waits.

They are put from outside, around what the loop, the schedules and the collectives call, while one step is
watched; in every other step nothing of them is there.
"""

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.profiler import record_function

from compare.contract.timeline import Kind, Span
from compare.pipeline.schedules import Kind as Tasks
from compare.pipeline.schedules import Task
from compare.spec.axes import PP
from torchpar.comm.collectives import Call, observers
from torchpar.launch import Rank
from torchpar.measure.watch import around_tasks
from torchpar.run import Run

PREFIX, BETWEEN = "shardpair", "|"  # a trace drops quotes and turns backslashes
STEP, WAIT = f"{PREFIX}{BETWEEN}step", f"{PREFIX}{BETWEEN}wait"
FIELDS = ("kind", "name", "microbatch", "chunk", "operation", "axis", "purpose")
"""What a mark tells of a span; of a collective it is around the call, which may end long before it does."""
PHASES: dict[str, Kind] = {
    "forward": "forward",
    "backward": "backward",
    "synchronisation": "backward",
    "optimizer": "update",
}
"""Phases of the timeline, by the heartbeat's phases (`torchpar.launch`)."""
TITLES: dict[Tasks, tuple[Kind, str]] = {
    Tasks.FORWARD: ("forward", "forward"),
    Tasks.BACKWARD: ("backward", "backward"),
    Tasks.BACKWARD_INPUT: ("backward", "input gradients"),
    Tasks.BACKWARD_WEIGHT: ("backward", "weight gradients"),
}


def mark(kind: Kind, name: str, **fields: Any) -> str:
    """The name of a range in the trace that becomes a `Span` with these fields."""
    span = Span(kind=kind, name=name, begin_us=0.0, duration_us=0.0, **fields)
    return BETWEEN.join((PREFIX, *(str(getattr(span, field)) for field in FIELDS)))


def span_of(name: str) -> Span | None:
    """The span, without times, that a range's name stands for; None for a name of PyTorch's."""
    prefix, *fields = name.split(BETWEEN)
    if prefix != PREFIX or len(fields) != len(FIELDS):
        return None
    times = {"begin_us": 0.0, "duration_us": 0.0}
    return msgspec.convert(dict(zip(FIELDS, fields, strict=True)) | times, Span, strict=False)


def call_name(call: Call) -> str:
    """A collective for people."""
    return f"{call.kind} of {call.purpose}" if call.purpose else call.kind


@contextmanager
def marked(run: Run) -> Generator[None]:
    """Put marks into the trace of what runs inside: one step."""
    with ExitStack() as stack:
        stack.enter_context(record_function(STEP))
        calls, phases = _Calls(), _Phases(run)
        observers.append(calls)
        stack.callback(observers.remove, calls)
        stack.callback(phases.end)
        stack.enter_context(patch.object(Rank, "at", lambda *place: phases.enter(*place)))
        stack.enter_context(_around(dist.Work, "wait", lambda work, *_: WAIT))
        if run.parallel.run_pipeline:
            title = functools.partial(_title, ranks=run.mesh[PP].size)
            stack.enter_context(around_tasks(lambda task: record_function(title(task))))

            def loss(schedule: Any, stage: Any, output: Any, targets: Any, microbatch: int, *_: Any) -> str:
                task = Task(Tasks.FORWARD, stage.stage_index, microbatch)
                return title(task, name="loss") if stage.is_last else ""

            stack.enter_context(_around(_PipelineSchedule, "_maybe_compute_loss", loss))
        yield


class _Phases:
    """Follows a rank's heartbeat: a phase lasts until the next one."""

    def __init__(self, run: Run):
        self._beat = Rank.at
        self._open: AbstractContextManager = nullcontext()
        self._passes = 0
        self._has_many = run.experiment.train.gradient_accumulation_steps > 1
        # A pipeline's forwards and backwards are its tasks; what lies between them is none of both.
        self._kinds = {k: v for k, v in PHASES.items() if not (run.parallel.run_pipeline and k == "forward")}

    def enter(self, rank: Rank, step: int, phase: str) -> None:
        """In place of `Rank.at`."""
        self._beat(rank, step, phase)
        self.end()
        self._passes += phase == "forward"
        if phase in self._kinds:
            of_pass = self._has_many and phase in ("forward", "backward")
            name = f"{phase}, pass {self._passes}" if of_pass else phase
            self._open = record_function(mark(self._kinds[phase], name))
            self._open.__enter__()

    def end(self) -> None:
        """The phase is over."""
        self._open.__exit__(None, None, None)
        self._open = nullcontext()


class _Calls:
    """Observes the collectives that are called by `torchpar.comm`."""

    def __init__(self) -> None:
        self._open: list[record_function] = []

    def begins(self, call: Call, full: torch.Tensor, members: Sequence[int], to: int | None) -> None:
        fields = {"operation": call.kind, "axis": call.axis, "purpose": call.purpose}
        self._open.append(record_function(mark("communication", call_name(call), **fields)))
        self._open[-1].__enter__()

    def ends(self) -> None:
        self._open.pop().__exit__(None, None, None)


def _title(task: Task, *, ranks: int, name: str = "") -> str:
    kind, usual = TITLES[task.kind]
    chunk = task.stage // ranks
    return mark(kind, f"{name or usual} {task.microbatch}", microbatch=task.microbatch, chunk=chunk)


def _around(owner: type, method: str, name_of: Callable[..., str]) -> AbstractContextManager:
    """A mark around every call of a method; `name_of` makes it from the call's arguments, or '' for none."""
    right = getattr(owner, method)

    @functools.wraps(right)
    def within(*arguments: Any, **options: Any) -> Any:
        name = name_of(*arguments, **options)
        with record_function(name) if name else nullcontext():
            return right(*arguments, **options)

    return patch.object(owner, method, within)
