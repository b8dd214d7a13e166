"""One stage of a pipeline: the layers of a rank, and the microbatches that are in flight in them.

GPipe, 1F1B and interleaved schedules need no more than this. `zero_bubble` divides the backward.
"""

from collections.abc import Callable

import torch
from torch import nn


class Stage:
    """A stage, by its number along the model, of a module that may have several: `module(x, stage=number)`.

    Attributes:
        saved: by microbatch the input and the output, from forward to backward. They keep autograd's graph.
    """

    def __init__(self, module: nn.Module, number: int):
        self.module, self.number = module, number
        self.saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(
        self,
        microbatch: int,
        x: torch.Tensor,
        *keys_B2: torch.Tensor,
        finish: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Run the stage on one microbatch: input (B, ...) to `finish` of its output, outside of the graph.

        On the last stage `finish` makes the loss (). Without gradients nothing is saved.
        """
        x = x.detach().requires_grad_(x.is_floating_point())  # the graph of a stage begins here
        y = finish(self.module(x, *keys_B2, stage=self.number))
        if torch.is_grad_enabled():
            self.saved[microbatch] = x, y
        return y.detach()

    def backward(self, microbatch: int, dy: torch.Tensor | None) -> torch.Tensor | None:
        """Add a microbatch's gradients to the parameters' gradients, and free its activations.

        From the gradient of the output, None of a loss, to the gradient of the input, None of token ids.
        """
        x, y = self.saved.pop(microbatch)
        torch.autograd.backward(y, dy)
        return x.grad
