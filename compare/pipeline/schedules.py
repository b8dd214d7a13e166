"""Pipeline schedules as plain data: for each rank, in which order it works on which microbatch.

A schedule is a list of `Task`s for each rank: an engine interprets it, `compare.pipeline.simulator` proves
properties of it, and a picture draws it.

Stages are numbered along the model. A rank with v chunks holds the stages rank, rank + p, rank + 2p, ...
"""

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The kinds of task: forward, and backward whole or in halves."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of the stage's input and of its weights."""
    BACKWARD_INPUT = "I"
    """Gradient of the stage's input: the stage before waits for it."""
    BACKWARD_WEIGHT = "W"
    """Gradients of the stage's weights: no rank waits for them, so they can fill a bubble."""


class Task(NamedTuple):
    """One unit of work of one rank."""

    kind: Kind
    stage: int
    """Along the model, from 0: which of the rank's chunks follows from it."""
    microbatch: int

    def __str__(self) -> str:
        """F0.3 is the forward of stage 0 on microbatch 3."""
        return f"{self.kind}{self.stage}.{self.microbatch}"


Schedule = list[list[Task]]
"""schedule[rank] is that rank's tasks, in the order in which it does them."""


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., arXiv 1811.06965). Keeps m activations everywhere."""
    return [
        [Task(kind, rank, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(microbatches)]
        for rank in range(ranks)
    ]


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Forwards until the first backward can begin, then in turn (PipeDream-flush, arXiv 2006.09503).

    Rank i keeps min(m, p - i) activations.
    """
    schedule = []
    for rank in range(ranks):
        forwards = [Task(Kind.FORWARD, rank, m) for m in range(microbatches)]
        backwards = [Task(Kind.BACKWARD, rank, m) for m in range(microbatches)]
        schedule.append(_in_turn(forwards, backwards, warm_up=ranks - rank - 1))
    return schedule


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B over v chunks a rank: a bubble v times smaller (Narayanan et al., arXiv 2104.04473, section 2.2).

    Microbatches go through the chunks in groups of p, which divides m. Rank i keeps
    min(v m, 2(p - i - 1) + (v - 1)p + 1) activations, each of a chunk, a v-th of the rank's layers.
    """
    if chunks == 1:
        return one_f_one_b(ranks, microbatches)
    schedule = []
    for rank in range(ranks):
        stages = [rank + chunk * ranks for chunk in range(chunks)]
        forwards = [Task(Kind.FORWARD, *item) for item in _grouped(stages, ranks, microbatches)]
        backwards = [Task(Kind.BACKWARD, *item) for item in _grouped(stages[::-1], ranks, microbatches)]
        warm_up = 2 * (ranks - rank - 1) + (chunks - 1) * ranks
        schedule.append(_in_turn(forwards, backwards, warm_up=warm_up))
    return schedule


def zero_bubble(ranks: int, microbatches: int) -> Schedule:
    """1F1B with backward in two halves, weight gradients filling the bubble (ZB-H1, arXiv 2401.10241).

    Rank i puts off i weight gradients while forwards are left, and does one after each input gradient from
    then on. It warms up with p - i - 1 forwards as in 1F1B, so that no rank holds more than min(m, p)
    activations: what 1F1B's first rank holds.
    """
    schedule = []
    for rank in range(ranks):
        forwards = [Task(Kind.FORWARD, rank, m) for m in range(microbatches)]
        inputs = [Task(Kind.BACKWARD_INPUT, rank, m) for m in range(microbatches)]
        tasks: list[Task] = []
        weights_done = 0
        for task in _in_turn(forwards, inputs, warm_up=ranks - rank - 1):
            tasks.append(task)
            if task.kind == Kind.BACKWARD_INPUT:
                forwards_left = task.microbatch + ranks - rank < microbatches
                if task.microbatch + 1 - weights_done > (rank if forwards_left else 0):
                    tasks.append(Task(Kind.BACKWARD_WEIGHT, rank, weights_done))
                    weights_done += 1
        tasks += [Task(Kind.BACKWARD_WEIGHT, rank, m) for m in range(weights_done, microbatches)]
        schedule.append(tasks)
    return schedule


def forward_only(ranks: int, microbatches: int, *, chunks: int = 1) -> Schedule:
    """Evaluation: a rank takes a microbatch through all of its stages before the next one."""
    return [
        [Task(Kind.FORWARD, rank + chunk * ranks, m) for m in range(microbatches) for chunk in range(chunks)]
        for rank in range(ranks)
    ]


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": lambda ranks, microbatches, chunks: gpipe(ranks, microbatches),
    "1f1b": lambda ranks, microbatches, chunks: one_f_one_b(ranks, microbatches),
    "interleaved": interleaved,
    "zero_bubble": lambda ranks, microbatches, chunks: zero_bubble(ranks, microbatches),
}


def make_schedule(name: str, *, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """A schedule by name: p ranks, m microbatches of a step, v chunks (stages on a rank)."""
    return SCHEDULES[name](ranks, microbatches, chunks)


def _in_turn(forwards: list[Task], backwards: list[Task], *, warm_up: int) -> list[Task]:
    """`warm_up` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    tasks = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        tasks += [forward, backward]
    return tasks + backwards[len(forwards) - warm_up :]


def _grouped(stages: list[int], ranks: int, microbatches: int) -> list[tuple[int, int]]:
    """(stage, microbatch): p microbatches through the first stage, the same through the next, and so on."""
    return [
        (stage, first + offset)
        for first in range(0, microbatches, ranks)
        for stage in stages
        for offset in range(ranks)
    ]
