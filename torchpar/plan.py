"""What an engine makes of a model: the handful of things that the training loop calls."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import nn


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Plan:
    """A model under a layout.

    Attributes:
        module: called as the model is.
        no_sync: a context for every forward and backward of a step but the last.
        finish_gradient_synchronization: after the last backward; the gradients are complete after it.
    """

    module: nn.Module
    no_sync: Callable[[], AbstractContextManager] = nullcontext
    finish_gradient_synchronization: Callable[[], None] = _nothing
