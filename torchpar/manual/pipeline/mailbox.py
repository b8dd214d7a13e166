"""Tensors of one rank of a pipeline between the instruction that makes them and the one that takes them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchpar.manual.pipeline.instructions import Message


class Mailbox:
    """Tensors by message: received, to be sent, or left by one stage of this rank for another.

    Args:
        given: by message, what no stage makes: the model's inputs, and None as the gradient of a loss.
        empty: makes an empty tensor to receive a message into.
    """

    def __init__(self, given: Mapping[Message, Any], *, empty: Callable[[Message], torch.Tensor]):
        self._tensors, self._empty = dict(given), empty

    def put(self, message: Message, tensor: torch.Tensor | None) -> None:
        """Leave a tensor, any shape; the gradient of the model's own input has no taker: drop it."""
        if message.stage >= 0:
            assert tensor is not None
            self._tensors[message] = tensor.contiguous()

    def take(self, message: Message) -> Any:
        """Remove the tensor, or the given object, from the box and return it."""
        return self._tensors.pop(message)

    def peek(self, message: Message) -> torch.Tensor:
        """The tensor, any shape; it stays in the box until it is taken."""
        return self._tensors[message]

    def buffer(self, message: Message) -> torch.Tensor:
        """An empty tensor, shaped as the message, to receive it into; it is in the box at once."""
        self._tensors[message] = tensor = self._empty(message)
        return tensor

    def require_empty(self) -> None:
        """Every message has been taken."""
        assert not self._tensors, f"messages without a taker: {sorted(self._tensors)}"
