"""Table of ticks: a pipeline schedule as arrays, for devices that run one program in lock-step.

At a tick every rank does one task at most. Then every rank hands an activation on to the next rank, and a
gradient back to the rank before, if anybody has one to send. Ranks are a ring, so that the last rank's chunk
k feeds the first rank's chunk k + 1. Slots for what arrives are given out here, by lifetimes: a device looks
up where to read and where to write, and decides nothing:

    input of a stage          until the microbatch's backward, which computes the stage's forward anew;
                              the first stage has none: its input is the batch
    gradient of its output    until the microbatch's backward; the last stage has none: it has the loss
    what a forward keeps      until the microbatch's backward, if it is to keep more than its input, which
                              then is needed for the forward alone

Each rank keeps the schedule's order, and does a task as soon as what it needs was done at an earlier tick:
with p ranks, m microbatches and one chunk, 2(m + p - 1) ticks. A tick is as long as the longest task in it.
GPipe's ticks are all forward or all backward; in 1F1B neighbours alternate, so that nearly every tick has a
backward in it: that is the price of its small stash in lock-step. jax-manual runs it.
"""

import heapq
from typing import NamedTuple

import numpy as np

from compare.pipeline.schedules import Kind, Schedule, Task
from compare.pipeline.simulator import ScheduleError, run

IDLE, FORWARD, BACKWARD = range(3)
CODES = {Kind.FORWARD: FORWARD, Kind.BACKWARD: BACKWARD}


class TickTasks(NamedTuple):
    """Tasks of the ranks: int arrays (ticks, ranks); without a task 0, or the scratch slot for a slot.

    Within the loop over ticks each device has its own task: the same fields, as scalars.
    """

    kind: np.ndarray
    """IDLE, FORWARD or BACKWARD."""
    stage: np.ndarray
    """Number along the model, from 0; it is the rank's chunk `stage // ranks`."""
    microbatch: np.ndarray
    input_slot: np.ndarray
    """Slot of the stage's input."""
    gradient_slot: np.ndarray
    """Slot of the gradient of its output, for a backward."""
    arriving_input: np.ndarray
    """Slot for the activation that arrives at the end of this tick."""
    arriving_gradient: np.ndarray
    kept_slot: np.ndarray
    """Slot in which a forward keeps its tensors for the backward."""


class Ticks(NamedTuple):
    """A schedule in lock-step."""

    tasks: TickTasks
    sends_activations: np.ndarray
    """Whether a rank sends an activation, by tick."""
    sends_gradients: np.ndarray
    ranks: int
    stages: int
    """Number of stages along the model."""
    microbatches: int
    input_slots: int
    """The most inputs of stages that a rank has at once. The slot after them is the scratch slot: it is
    written where nothing of use arrives, and its content is never used."""
    gradient_slots: int
    """Most gradients of outputs that a rank has at once, with such a scratch slot after them."""
    kept_slots: int
    """The most forwards that a rank has kept at once, without a scratch slot; 0 if backward computes the
    forward anew."""


def lock_step(schedule: Schedule, *, keeps: bool = False) -> Ticks:
    """Put a schedule on ticks, and give every message a slot.

    With `keeps` forwards keep what backward needs, which otherwise begins with the forward. Raises
    ScheduleError: incomplete, deadlocked, or backward in halves.
    """
    tick_of = {slot.task: int(slot.start) for slot in run(schedule, lambda task: 1.0)}
    if halves := next((task for task in tick_of if task.kind not in CODES), None):
        raise ScheduleError(f"{halves}: in lock-step backward is one task; use another schedule")
    stages, ranks = 1 + max(task.stage for task in tick_of), len(schedule)
    shape = (1 + max(tick_of.values()), ranks)
    kind, of_stage, microbatch = (np.zeros(shape, np.int32) for _ in range(3))
    inputs, gradients, kept = [], [], []
    for task, tick in tick_of.items():
        at = tick, task.stage % ranks
        kind[at], of_stage[at], microbatch[at] = CODES[task.kind], task.stage, task.microbatch
        if task.kind == Kind.BACKWARD:
            forward = tick_of[Task(Kind.FORWARD, task.stage, task.microbatch)]
            if keeps:
                kept.append(_Message(forward, task.stage % ranks, (tick,)))
            if task.stage > 0:
                sent = tick_of[Task(Kind.FORWARD, task.stage - 1, task.microbatch)]
                inputs.append(_Message(sent, task.stage % ranks, (forward,) if keeps else (forward, tick)))
            if task.stage + 1 < stages:
                sent = tick_of[Task(Kind.BACKWARD, task.stage + 1, task.microbatch)]
                gradients.append(_Message(sent, task.stage % ranks, (tick,)))
    input_slots, read_input, arriving_input = _give_slots(inputs, shape)
    gradient_slots, read_gradient, arriving_gradient = _give_slots(gradients, shape)
    kept_slots, read_kept, put_kept = _give_slots(kept, shape)
    return Ticks(
        tasks=TickTasks(
            kind=kind,
            stage=of_stage,
            microbatch=microbatch,
            input_slot=read_input,
            gradient_slot=read_gradient,
            arriving_input=arriving_input,
            arriving_gradient=arriving_gradient,
            kept_slot=np.where(kind == FORWARD, put_kept, read_kept),
        ),
        sends_activations=np.asarray((arriving_input < input_slots).any(axis=1)),
        sends_gradients=np.asarray((arriving_gradient < gradient_slots).any(axis=1)),
        ranks=ranks,
        stages=stages,
        microbatches=1 + int(microbatch.max()),
        input_slots=input_slots,
        gradient_slots=gradient_slots,
        kept_slots=kept_slots,
    )


class _Message(NamedTuple):
    """One message, and when it is sent and read."""

    arrives: int
    """At the end of this tick."""
    rank: int
    """The receiver."""
    read: tuple[int, ...]
    """The ticks that need it, in order; at the end of the last its slot is free for another message."""


def _give_slots(messages: list[_Message], shape: tuple[int, int]) -> tuple[int, np.ndarray, np.ndarray]:
    """A slot for every message: how many there must be, where each tick reads, where each arrival goes."""
    nowhere = -1
    read, write = np.full((2, *shape), nowhere, np.int32)
    count = 0
    in_use: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(shape[1])}  # (last read, slot)
    for message in sorted(messages):
        held = in_use[message.rank]
        if held and held[0][0] <= message.arrives:
            _, slot = heapq.heappop(held)
        else:  # all slots so far are alive
            slot = len(held)
            count = max(count, slot + 1)
        heapq.heappush(held, (message.read[-1], slot))
        write[message.arrives, message.rank] = slot
        read[list(message.read), message.rank] = slot
    read[read == nowhere] = write[write == nowhere] = count  # the scratch slot
    return count, read, write
