"""Marks in PyTorch's trace of a step: its phases, a pipeline's tasks, collectives, and where a rank waits.

They are put from outside, around what the loop, the schedules and the collectives call, while one step is
watched; in every other step nothing of them is there.
"""

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal
from unittest.mock import patch

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.profiler import record_function

from compare.contract.timeline import Kind
from compare.pipeline.schedules import Kind as Tasks
from compare.pipeline.schedules import Task
from compare.spec.axes import PP
from torchpar.comm.collectives import Call, observers
from torchpar.launch import Rank
from torchpar.measure.watch import around_tasks
from torchpar.run import Run

PREFIX, BETWEEN = "shardpair", "|"  # a trace drops quotes and turns backslashes
What = Kind | Literal["step", "wait"]


class TraceMark(Struct, frozen=True, kw_only=True):
    """Description of a range of the trace."""

    what: What
    """communication is a call, which may end long before what it began."""
    name: str = ""
    microbatch: int = -1
    chunk: int = 0
    operation: str = ""
    """Kind of communication; operation, axis and purpose are the ledger's."""
    axis: str = ""
    purpose: str = ""

    def __str__(self) -> str:
        fields = (getattr(self, field) for field in self.__struct_fields__)
        return BETWEEN.join((PREFIX, *map(str, fields)))

    @classmethod
    def parse(cls, name: str) -> "TraceMark | None":
        """The mark of this name in a trace; None for a name of PyTorch's."""
        prefix, *fields = name.split(BETWEEN)
        if prefix != PREFIX:
            return None
        return msgspec.convert(dict(zip(cls.__struct_fields__, fields, strict=True)), cls, strict=False)


PHASES: dict[str, Kind] = {
    "forward": "forward",
    "backward": "backward",
    "synchronisation": "backward",
    "optimizer": "update",
}
TITLES: dict[Tasks, tuple[str, Kind]] = {
    Tasks.FORWARD: ("forward", "forward"),
    Tasks.BACKWARD: ("backward", "backward"),
    Tasks.BACKWARD_INPUT: ("input gradients", "backward"),
    Tasks.BACKWARD_WEIGHT: ("weight gradients", "backward"),
}
"""Phases of the timeline, by the heartbeat's phases (`torchpar.launch`)."""


@contextmanager
def marked(run: Run) -> Generator[None]:
    """Put marks into the trace of what runs inside: one step."""
    with ExitStack() as stack:
        stack.enter_context(record_function(str(TraceMark(what="step"))))
        calls = _Calls()
        observers.append(calls)
        stack.callback(observers.remove, calls)
        stack.enter_context(_around(dist.Work, "wait", lambda work, *_: TraceMark(what="wait")))
        if run.parallel.run_pipeline:
            stages = run.mesh[PP].size
            stack.enter_context(around_tasks(lambda task: record_function(str(_mark_of(task, stages)))))
            stack.enter_context(_around(_PipelineSchedule, "_maybe_compute_loss", _loss_mark(stages)))
        phases = _Phases(run)
        stack.callback(phases.end)
        stack.enter_context(patch.object(Rank, "at", lambda *place: phases.enter(*place)))
        yield


class _Phases:
    """Follows a rank's heartbeat: a phase lasts until the next one."""

    def __init__(self, run: Run):
        self._beat = Rank.at
        self._open: record_function | None = None
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
            self._open = record_function(str(TraceMark(what=self._kinds[phase], name=name)))
            self._open.__enter__()

    def end(self) -> None:
        """The phase is over."""
        if self._open:
            self._open.__exit__(None, None, None)
        self._open = None


def call_name(call: Call) -> str:
    """A collective for people."""
    return f"{call.kind} of {call.purpose}" if call.purpose else call.kind


class _Calls:
    """Observes the collectives that are called by `torchpar.comm`."""

    def __init__(self) -> None:
        self._open: list[record_function] = []

    def begins(self, call: Call, full: torch.Tensor, members: Sequence[int], to: int | None) -> None:
        name = call_name(call)
        mark = TraceMark(
            what="communication", name=name, operation=call.kind, axis=call.axis, purpose=call.purpose
        )
        self._open.append(record_function(str(mark)))
        self._open[-1].__enter__()

    def ends(self) -> None:
        self._open.pop().__exit__(None, None, None)


def _mark_of(task: Task, ranks: int, name: str = "") -> TraceMark:
    title, kind = TITLES[task.kind]
    return TraceMark(
        what=kind,
        name=f"{name or title} {task.microbatch}",
        microbatch=task.microbatch,
        chunk=task.stage // ranks,
    )


def _loss_mark(ranks: int) -> Callable[..., TraceMark | None]:
    """The mark of PyTorch's loss of a microbatch, on the last stage alone."""

    def mark(schedule: Any, stage: Any, output: Any, targets: Any, microbatch: int, *_: Any):
        task = Task(Tasks.FORWARD, stage.stage_index, microbatch)
        return _mark_of(task, ranks, "loss") if stage.is_last else None

    return mark


def _around(owner: type, method: str, mark: Callable[..., TraceMark | None]) -> AbstractContextManager:
    """A mark around every call of a method; `mark` makes it from the call's arguments, or None for none."""
    right = getattr(owner, method)

    @functools.wraps(right)
    def within(*arguments: Any, **options: Any) -> Any:
        made = mark(*arguments, **options)
        with record_function(str(made)) if made else nullcontext():
            return right(*arguments, **options)

    return patch.object(owner, method, within)
