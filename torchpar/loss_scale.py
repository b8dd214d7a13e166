"""Loss scaling, as `compare.numerics.loss_scale` has it: before backward, and after it."""

from typing import Any

import torch
from torch import nn

from compare.side.recording import Progress
from compare.spec.experiment import Experiment
from torchpar.parallel_model import ParallelModel, local


def scale_loss(loss: nn.Module, progress: Progress, *, parts: float = 1) -> None:
    """From now on gradients of a mean loss, of one of `parts` undivided ones, are as the scale then says."""

    def scaled(module: nn.Module, arguments: tuple, value: torch.Tensor) -> torch.Tensor:
        assert progress.loss_scale is not None
        return _ScaleGradient.apply(value, progress.loss_scale.scale / parts)

    loss.register_forward_hook(scaled)


def undivided_parts(parallel: ParallelModel, experiment: Experiment) -> float:
    """The microbatches of a step, where backward does not begin with a share of the mean; else 1.

    Over the ranks whose mean it is: a mean of two ranks' rows would overflow later than two means.
    """
    in_step = experiment.layout.microbatches * experiment.train.gradient_accumulation_steps
    return (in_step if parallel.divides_late else 1) / parallel.means_of


@torch.no_grad()
def unscale_gradients(parallel: ParallelModel, scale: float) -> None:
    """Divide this rank's gradients by the scale; what overflowed is not finite."""
    gradients = [local(p.grad) for p in parallel.parameters.values() if p.grad is not None]
    if gradients:
        torch._foreach_div_(gradients, scale)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return value.clone()  # zero bubble detaches a stage's output, which no view allows

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.scale, None
