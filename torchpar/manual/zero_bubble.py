"""A stage whose backward is two tasks: the gradient of the input, and later the gradients of the weights.

Backward of a linear layer is two products. The stage before waits for the first, the gradient of the input.
Only the optimizer waits for the second, the gradient of the weight: it can fill a bubble of the schedule.

    autograd's linear         input -> dx, dW
    SplitLinear               input -> dx, and the two factors of dW, which are saved
    backward_weight           multiplies the saved factors: dW = dy^T x

All other gradients (norms, embeddings, attention) are computed with the input's.

N rows (all dims but the last), I input features, O output features.
Source: Zero Bubble Pipeline Parallelism (arXiv 2401.10241).
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

from torchpar.manual.stage import Stage
from torchpar.manual.tensor_parallel import ColumnParallelLinear, RowParallelLinear


class Factors(NamedTuple):
    """The factors of a linear layer's gradients."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    x_NI: torch.Tensor
    dy_NO: torch.Tensor


class SplitLinear(Function):
    """F.linear, whose backward gives the gradient of the input and saves the factors of the weight's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameters: Any, factors: list[Factors]) -> torch.Tensor:
        # In a tuple autograd does not see the parameters, and differentiates by x alone.
        weight, bias = (p if p is None else p.detach().to(x.dtype) for p in parameters)
        ctx.save_for_backward(x, weight)
        ctx.parameters, ctx.factors = parameters, factors
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor):
        x, weight = ctx.saved_tensors
        x_NI, dy_NO = (t.reshape(-1, t.shape[-1]) for t in (x, gradients[0]))
        ctx.factors.append(Factors(*ctx.parameters, x_NI, dy_NO))
        return gradients[0] @ weight, None, None


class ZeroBubbleStage(Stage):
    """A stage whose `backward` stops at the input; `backward_weight` adds the weights' gradients.

    Attributes:
        factors: by microbatch the factors that `backward` saved.
    """

    def __init__(self, module: nn.Module, number: int):
        super().__init__(module, number)
        self.factors: dict[int, list[Factors]] = {}
        self._microbatch = 0  # the one that runs
        for layer in module.modules():
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
                layer.linear = self._linear
            elif isinstance(layer, nn.Linear):
                layer.forward = partial(self._linear_of, layer)  # ty: ignore[invalid-assignment]

    def forward(
        self, microbatch: int, x: torch.Tensor, *keys_B2: torch.Tensor, **finish: Any
    ) -> torch.Tensor:
        """As `Stage.forward`."""
        self._microbatch = microbatch
        return super().forward(microbatch, x, *keys_B2, **finish)

    def backward(self, microbatch: int, dy: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of the input, and the factors of the weights' gradients."""
        self._microbatch = microbatch  # a checkpoint runs the layers again
        return super().backward(microbatch, dy)

    def backward_weight(self, microbatch: int) -> None:
        """Add the gradients of the weights and biases of linear layers."""
        factors = self.factors.pop(microbatch)
        while factors:  # each is freed after its use
            weight, bias, x_NI, dy_NO = factors.pop()
            add_gradient(weight, dy_NO.t() @ x_NI)
            if bias is not None:
                add_gradient(bias, dy_NO.sum(0))

    def _linear_of(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x, layer.weight, layer.bias)

    def _linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return F.linear(x, weight, bias)
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        return SplitLinear.apply(x, (weight, bias), self.factors.setdefault(self._microbatch, []))


def add_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add to a parameter's gradient as backward does: its hooks run."""
    torch.autograd.backward(parameter, gradient.to(parameter.dtype))
