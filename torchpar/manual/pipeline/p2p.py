"""Activations and their gradients between stages of a pipeline: what one rank sends and receives in a step.

Nothing here waits for a send, except where a later message proves that it has arrived: so a send can never
hold up a schedule that `compare.contract.schedule_simulator` found free of deadlock.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from compare.contract.communication import ACTIVATION_GRADIENTS, ACTIVATIONS
from compare.contract.schedule_simulator import Action
from compare.contract.schedules import Kind
from torchpar.comm.collectives import Axis
from torchpar.comm.handles import Work


class Message(NamedTuple):
    """What a task of another stage waits for."""

    what: str
    """ACTIVATIONS or ACTIVATION_GRADIENTS."""
    stage: int
    """The one that waits."""
    microbatch: int


def message_of(action: Action) -> Message:
    """What an action that sends or receives is about."""
    kind, stage, microbatch = action.task
    step = 1 if kind == Kind.FORWARD else -1
    what = ACTIVATIONS if kind == Kind.FORWARD else ACTIVATION_GRADIENTS
    return Message(what, stage + step if action.what.startswith("send") else stage, microbatch)


class Mailbox:
    """The messages of one rank in one step.

    Args:
        axis: the ranks.
        actions: of all ranks, from `with_communication`.
        buffer: makes an empty tensor to receive a message into.
    """

    def __init__(self, axis: Axis, actions: list[list[Action]], *, buffer: Callable[[Message], torch.Tensor]):
        self._axis, self._buffer = axis, buffer
        self._own = actions[axis.rank]
        self._tags = _tags(actions)
        self._proven = _proven_arrivals(actions, axis.rank)
        self._tensors: dict[Message, torch.Tensor] = {}
        self._receiving: dict[Message, tuple[Work, torch.Tensor]] = {}
        self._sending: dict[Message, tuple[Work, torch.Tensor]] = {}

    def put(self, message: Message, tensor: torch.Tensor) -> None:
        """Leave a tensor for `carry_out` to send, or for another stage of this rank to take."""
        self._tensors[message] = tensor.contiguous()

    def take(self, message: Message) -> torch.Tensor:
        """What was received, or left by another stage of this rank."""
        return self._tensors.pop(message)

    def carry_out(self, action: Action) -> None:
        """Begin a send, or finish a receive."""
        message = message_of(action)
        if action.what.startswith("send"):
            tensor, tag = self._tensors.pop(message), self._tags[message]
            work = self._axis.start_send(tensor, to=action.peer, tag=tag, purpose=message.what)
            self._sending[message] = (work, tensor)
            return
        self._post(action)
        work, self._tensors[message] = self._receiving.pop(message)
        work.wait()
        for arrived in self._proven.get(message, ()):
            self._sending.pop(arrived)[0].wait()  # returns at once, and frees the tensor

    def post_receives(self, place: int) -> None:
        """Begin the receives between the actions `place` and the next computation."""
        for action in self._own[place:]:
            if action.what == "compute":
                return
            if action.what.startswith("receive"):
                self._post(action)

    def close(self) -> None:
        """Wait for the sends that are left."""
        for work, _ in self._sending.values():
            work.wait()
        assert not self._tensors, "messages that nobody took"

    def _post(self, action: Action) -> None:
        message = message_of(action)
        if message not in self._receiving:
            tensor = self._buffer(message)
            work = self._axis.start_receive(tensor, source=action.peer, tag=self._tags[message])
            self._receiving[message] = (work, tensor)


def _tags(actions: list[list[Action]]) -> dict[Message, int]:
    """A number for every message, the same on all ranks."""
    messages = {message_of(action) for own in actions for action in own if action.what != "compute"}
    return {message: tag for tag, message in enumerate(sorted(messages), start=1)}


def _proven_arrivals(actions: list[list[Action]], rank: int) -> dict[Message, list[Message]]:
    """By message to this rank: which of this rank's messages its sender had received before it sent that."""
    proven = {}
    for own in actions:
        arrived: list[Message] = []
        for action in own:
            if action.what == "compute" or action.peer != rank:
                continue
            if action.what.startswith("send"):
                proven[message_of(action)], arrived = arrived, []
            else:
                arrived.append(message_of(action))
    return proven
