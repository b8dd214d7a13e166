"""Simulation of a pipeline schedule without a network: order, progress, memory, time."""

from collections import Counter, deque
from collections.abc import Callable
from itertools import product, starmap
from typing import NamedTuple

from compare.pipeline.schedules import Kind, Schedule, Task

COST = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}
"""Time of a task in units of a stage's forward: a backward is two products for each of the forward's one."""


class ScheduleError(ValueError):
    """A schedule that cannot be right. The message names the rank and the task."""


class Slot(NamedTuple):
    """Time of a rank's task, in units of a whole rank's forward of one microbatch."""

    rank: int
    task: Task
    start: float
    end: float


class Action(NamedTuple):
    """One action of a rank, its communication spelled out: compute, or send to or receive from a peer."""

    what: str
    """compute, send_activation, receive_activation, send_gradient or receive_gradient."""
    task: Task
    """For compute: the task. Else: the task whose result is sent, or that waits for what is received."""
    peer: int
    """The other rank; -1 for compute."""


def prerequisites(task: Task, stages: int) -> list[Task]:
    """Tasks that must be done before a task can begin, on any rank."""
    kind, stage, microbatch = task
    if kind == Kind.FORWARD:
        return [Task(Kind.FORWARD, stage - 1, microbatch)] if stage else []
    if kind == Kind.BACKWARD_WEIGHT:
        return [Task(Kind.BACKWARD_INPUT, stage, microbatch)]
    needs = [Task(Kind.FORWARD, stage, microbatch)]
    return [*needs, Task(kind, stage + 1, microbatch)] if stage + 1 < stages else needs


def check_complete(schedule: Schedule) -> int:
    """Every stage does every microbatch's forward and backward exactly once, on the rank that holds it.

    An evaluation has no backward. Returns the number of stages along the model. Raises ScheduleError: a task
    is missing, doubled, or on another rank's list.
    """
    ranks = len(schedule)
    tasks = Counter(task for rank in schedule for task in rank)
    stages = 1 + max(task.stage for task in tasks)
    microbatches = 1 + max(task.microbatch for task in tasks)
    for rank, own in enumerate(schedule):
        for task in own:
            if task.stage % ranks != rank:
                raise ScheduleError(f"rank {rank} has {task}, which belongs to rank {task.stage % ranks}")
    kinds = {task.kind for task in tasks} | {Kind.FORWARD}
    if len(kinds) > 1:
        halves = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
        kinds = {Kind.FORWARD, *(halves if Kind.BACKWARD_INPUT in kinds else [Kind.BACKWARD])}
    expected = set(starmap(Task, product(kinds, range(stages), range(microbatches))))
    for task in sorted(expected | set(tasks)):
        if tasks[task] != (task in expected):
            raise ScheduleError(f"{task} is done {tasks[task]} times, not {int(task in expected)}")
    return stages


def run(schedule: Schedule, seconds: Callable[[Task], float] | None = None) -> list[Slot]:
    """Carry a schedule out on a clock: each rank does its tasks in order, each when its needs are met.

    Sends are buffered, as an engine's asynchronous ones are, and cost their sender no time; receives wait.
    Raises ScheduleError: incomplete, or deadlocked.

    Args:
        schedule: complete.
        seconds: of each task. By default a rank's forward of one microbatch takes 1, however many chunks it
            is cut into, and the others follow `COST`.
    """
    stages = check_complete(schedule)
    ranks, chunks = len(schedule), stages // len(schedule)
    cost = seconds or (lambda task: COST[task.kind] / chunks)
    ended: dict[Task, float] = {}
    slots: list[Slot] = []
    left, clock = [deque(own) for own in schedule], [0.0] * ranks
    while any(left):
        done = len(slots)
        for rank, own in enumerate(left):
            while own and all(need in ended for need in prerequisites(own[0], stages)):
                task = own.popleft()
                needs = prerequisites(task, stages)
                start = max([clock[rank], *(ended[need] for need in needs)])
                clock[rank] = ended[task] = start + cost(task)
                slots.append(Slot(rank, task, start, clock[rank]))
        if len(slots) == done:
            waiting = [f"rank {rank} at {own[0]}" for rank, own in enumerate(left) if own]
            raise ScheduleError(f"deadlock: {'; '.join(waiting)}")
    return slots


def makespan(schedule: Schedule) -> float:
    """Time of the whole schedule, in forwards of one microbatch through one rank."""
    return max(slot.end for slot in run(schedule))


def bubble_fraction(schedule: Schedule) -> float:
    """The share of the ranks' time in which they wait: 1 - work / (ranks x makespan)."""
    slots = run(schedule)
    work = sum(slot.end - slot.start for slot in slots)
    return 1.0 - work / (len(schedule) * max(slot.end for slot in slots))


def peak_in_flight(own: list[Task]) -> int:
    """The most activations that one rank holds at once: forwards whose (weight) backward is still to come."""
    split = any(task.kind == Kind.BACKWARD_WEIGHT for task in own)
    releases = Kind.BACKWARD_WEIGHT if split else Kind.BACKWARD
    held = peak = 0
    for task in own:
        held += (task.kind == Kind.FORWARD) - (task.kind == releases)
        peak = max(peak, held)
    return peak


def with_communication(schedule: Schedule) -> list[list[Action]]:
    """Each rank's actions, receives and sends in their places. Neighbouring chunks of one rank need none."""
    ranks, stages = len(schedule), check_complete(schedule)

    def message(what: str, task: Task, other_stage: int) -> list[Action]:
        peer = other_stage % ranks
        inside = 0 <= other_stage < stages and peer != task.stage % ranks
        return [Action(what, task, peer)] if inside else []

    def spelled_out(task: Task) -> list[Action]:
        compute = [Action("compute", task, -1)]
        if task.kind == Kind.BACKWARD_WEIGHT:
            return compute
        name, step = ("activation", 1) if task.kind == Kind.FORWARD else ("gradient", -1)
        return [
            *message(f"receive_{name}", task, task.stage - step),
            *compute,
            *message(f"send_{name}", task, task.stage + step),
        ]

    return [[action for task in own for action in spelled_out(task)] for own in schedule]
