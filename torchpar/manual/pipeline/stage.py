"""One stage of a pipeline: forward and backward of one microbatch at a time, for any module.

Backward is one task, or two: gradients of the stage's input first, which the stage before it waits for, and
those of linear layers' weights later. Gradients add up over microbatches: those of linear layers' weights in
the product that makes them, all others as autograd adds them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from torchpar.manual.pipeline.weight_gradients import Factors, WeightGradients, add_up


@dataclass(frozen=True)
class _Activations:
    """Tensors that backward needs of one microbatch; dropping them frees the graph behind `y`."""

    x: torch.Tensor
    y: torch.Tensor
    factors: list[Factors]
    """Of the weight gradients that are put off."""


class Stage:
    """A module that takes one tensor and returns one, and the microbatches that are under way in it.

    Args:
        module: on the first stage its input is the microbatch itself.
        splits_backward: whether weight gradients are a task of their own.
        number: along the model.
    """

    def __init__(self, module: nn.Module, *, splits_backward: bool, number: int = 0):
        self.module, self.splits_backward, self.number = module, splits_backward, number
        self._of_weights = WeightGradients(module, spares_hooks=not splits_backward)
        self._activations: dict[int, _Activations] = {}
        self._factors: dict[int, list[Factors]] = {}

    @property
    def in_flight(self) -> int:
        """Microbatches whose forward is done, and whose backward is not."""
        return len(self._activations) + len(self._factors)

    def forward(
        self,
        microbatch: int,
        x: torch.Tensor,
        *also: torch.Tensor,
        finish: Callable[[torch.Tensor], torch.Tensor] = lambda y: y,
    ) -> torch.Tensor:
        """Run the module on one microbatch, and keep what its backward needs.

        Args:
            microbatch: its number.
            x: output of the stage before, (B, ...) of a microbatch; on the first stage the microbatch.
            also: further inputs of the module, (B, ...), without gradients.
            finish: from the module's output to the stage's: the loss, on the last stage.

        Returns:
            The output, detached: (B, ...), or a loss ().
        """
        x = x.detach().requires_grad_(x.is_floating_point())
        factors: list[Factors] = []
        with self._of_weights.into(factors.append if self.splits_backward else add_up):
            y = finish(self.module(x, *also))
        self._activations[microbatch] = _Activations(x, y, factors)
        return y.detach()

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Add this microbatch's gradients to those of the parameters, and free its activations.

        Args:
            microbatch: its number.
            gradient: of the stage's output, shaped as it; None for a loss.

        Returns:
            The gradient of the input, shaped as it; None of tokens, which are integers.
        """
        kept = self._activations.pop(microbatch)
        if kept.y.requires_grad:  # else the stage is frozen, and its input is no floating-point tensor
            with self._of_weights.into(kept.factors.append if self.splits_backward else add_up):
                torch.autograd.backward(kept.y, gradient)
        if self.splits_backward:
            self._factors[microbatch] = kept.factors
        return kept.x.grad

    def backward_weight(self, microbatch: int) -> None:
        """Add the weight gradients that `backward` left, where they are a task of their own."""
        factors = self._factors.pop(microbatch)
        while factors:
            add_up(factors.pop())
