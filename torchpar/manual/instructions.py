"""Instructions of one rank of a pipeline: a schedule with its communication, as plain data.

Rank 1 of 2 does a microbatch of GPipe so:

    StartReceive   FinishReceive   Forward   Backward   Send

Order is decided before anything runs and without a network. All ranks go through their messages in one order
(`compare.pipeline.rendezvous`), so that a receive finds its send without a tag. A send is waited for only
where a later message proves that it has arrived, so that it holds up nothing.
"""

from typing import NamedTuple

from compare.contract.communication import ACTIVATION_GRADIENTS, ACTIVATIONS
from compare.pipeline.rendezvous import in_one_order
from compare.pipeline.schedules import Kind, Schedule, Task
from compare.pipeline.simulator import Action, with_communication


class Message(NamedTuple):
    """A tensor between two stages, named after the stage that takes it."""

    what: str
    """ACTIVATIONS or ACTIVATION_GRADIENTS."""
    stage: int
    microbatch: int


def activation(stage: int, microbatch: int) -> Message:
    """The input of a stage."""
    return Message(ACTIVATIONS, stage, microbatch)


def gradient(stage: int, microbatch: int) -> Message:
    """The gradient of a stage's output."""
    return Message(ACTIVATION_GRADIENTS, stage, microbatch)


class StartReceive(NamedTuple):
    """Post a receive."""

    message: Message
    source: int


class FinishReceive(NamedTuple):
    """Wait for a message that was posted."""

    message: Message
    arrived: tuple[Message, ...]
    """Sends of this rank that its sender had received before: nothing is left to wait for."""


class Forward(NamedTuple):
    """Run a stage on a microbatch."""

    stage: int
    microbatch: int


class Backward(NamedTuple):
    """Backward of a microbatch through a stage: all of it, or as far as its input."""

    stage: int
    microbatch: int
    is_last: bool
    """The stage's gradients are complete after it; never so where a backward has two halves."""


class BackwardWeight(NamedTuple):
    """The other half of a backward: the gradients of a stage's weights."""

    stage: int
    microbatch: int


class Send(NamedTuple):
    """Begin to send a tensor that a stage of this rank made."""

    message: Message
    to: int


Instruction = StartReceive | FinishReceive | Forward | Backward | BackwardWeight | Send


def make_instructions(schedule: Schedule, rank: int) -> list[Instruction]:
    """Instructions of one rank for a step, in order.

    Raises:
        ScheduleError: the schedule is incomplete, or deadlocked.
    """
    actions = with_communication(schedule)
    proven = _proven_arrivals(actions, rank)
    needed = {action.task: action for action in actions[rank] if _is_receive(action)}
    last_backwards = {task.stage: task for task in schedule[rank] if task.kind == Kind.BACKWARD}
    instructions: list[Instruction] = []
    for action in in_one_order(schedule)[rank]:
        if action.what == "compute":
            if received := needed.get(action.task):
                message = _message_of(received)
                instructions.append(FinishReceive(message, proven.get(message, ())))
            is_last = last_backwards.get(action.task.stage) == action.task
            instructions.append(_computation(action.task, is_last=is_last))
        elif _is_receive(action):
            instructions.append(StartReceive(_message_of(action), action.peer))
        else:
            instructions.append(Send(_message_of(action), action.peer))
    return instructions


def _computation(task: Task, *, is_last: bool) -> Forward | Backward | BackwardWeight:
    kind, stage, microbatch = task
    if kind == Kind.FORWARD:
        return Forward(stage, microbatch)
    if kind == Kind.BACKWARD_WEIGHT:
        return BackwardWeight(stage, microbatch)
    return Backward(stage, microbatch, is_last)


def _message_of(action: Action) -> Message:
    """The message that an action sends or receives."""
    kind, stage, microbatch = action.task
    is_send = action.what.startswith("send")
    if kind == Kind.FORWARD:
        return activation(stage + is_send, microbatch)
    return gradient(stage - is_send, microbatch)


def _is_receive(action: Action) -> bool:
    return action.what.startswith("receive")


def _proven_arrivals(actions: list[list[Action]], rank: int) -> dict[Message, tuple[Message, ...]]:
    """By message to this rank: which of this rank's messages its sender had received before it sent that."""
    proven = {}
    for own in actions:
        arrived: list[Message] = []
        for action in own:
            if action.what == "compute" or action.peer != rank:
                continue
            if action.what.startswith("send"):
                proven[_message_of(action)], arrived = tuple(arrived), []
            else:
                arrived.append(_message_of(action))
    return proven
