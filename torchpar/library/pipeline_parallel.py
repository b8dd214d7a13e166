"""Pipeline parallelism by PyTorch: `torch.distributed.pipelining` has the schedules and moves the data.

It does not know of a weight that two stages share: its gradients are summed after the schedule
(`gpt_stages.sum_tied_gradients`). The zero-bubble schedule is ZB1P, and finds the two halves of a backward in
autograd's graph.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from compare.contract.communication import LOSS
from torchpar.comm.collectives import Axis

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI = {"interleaved": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble}
Context = Callable[[], AbstractContextManager]


def run_pipeline(
    schedule: Any,
    inputs: torch.Tensor | None,
    targets: torch.Tensor | None,
    *,
    also: Mapping[str, torch.Tensor] = {},
    forward_only: bool = False,
) -> list[torch.Tensor]:
    """Forward and backward of a batch: PyTorch's schedule computes, sends and receives.

    Args:
        schedule: one of `SINGLE` or `MULTI`, over this rank's stages.
        inputs: (B, T), on the rank that has the first stage; None on the others.
        targets: (B, T), on the rank that has the last stage; None on the others.
        also: further inputs of every stage by keyword, (B, ...), on all ranks.
        forward_only: no backward.

    Returns:
        The microbatches' losses, () each, on the rank that has the last stage.
    """
    losses: list[torch.Tensor] = []
    first = () if inputs is None else (inputs,)
    last = {} if targets is None else {"target": targets, "losses": losses}
    (schedule.eval if forward_only else schedule.step)(*first, **last, **also, return_outputs=False)
    return losses


class PipelineParallel:
    """The stages of one rank, and PyTorch's schedule that takes microbatches through them.

    Args:
        stages: this rank's modules by their number along the model, plain or wrapped by DDP or FSDP2, which
            PyTorch's stages hold back from reducing before their last backward.
        count: of all stages.
        schedule: gpipe, 1f1b, interleaved or zero_bubble.
        loss: from the last stage's output and a microbatch's targets to their mean loss, a scalar.
        axis: the ranks.
        device: where this rank computes.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        count: int,
        schedule: str,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        axis: Axis,
        device: torch.device,
    ):
        self._axis, self._device, self._schedule, self._loss = axis, device, schedule, loss
        self._has_first, self._has_last = 0 in stages, count - 1 in stages
        self._modules, self._count = stages, count
        self._made: dict[bool, Any] = {}

    def run(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        *,
        microbatches: int,
        also: Mapping[str, torch.Tensor] = {},
        context: Context = nullcontext,
    ) -> torch.Tensor:
        """Forward and backward of a batch; adds the gradients of its mean loss to the parameters'.

        Without gradients forward alone.

        Args:
            inputs, targets: whole, on all ranks; cut along dim 0.
            microbatches: into how many.
            also: further inputs of every stage, (B, ...), by keyword; cut likewise.
            context: made anew around every forward, such as autocast.

        `microbatches` and `context` are those of the first call ever after.

        Returns:
            The mean loss, a scalar, the same on all ranks.
        """
        forward_only = not torch.is_grad_enabled()
        if forward_only not in self._made:
            self._made[forward_only] = self._make(microbatches, context)
        schedule = self._made[forward_only]
        first, last = inputs if self._has_first else None, targets if self._has_last else None
        losses = run_pipeline(schedule, first, last, also=also, forward_only=forward_only)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for share in losses:
            total += share.detach() / microbatches
        self._axis.all_reduce(total, purpose=LOSS)
        return total

    def _make(self, microbatches: int, context: Context):
        """A schedule of training or of evaluation.

        One for both would learn the messages' shapes anew whenever they change places, which is a forward and
        backward more, and one more reduction of all gradients by DDP.
        """
        if not self._made:
            for module in self._modules.values():
                module.forward = within(context, module.forward)
        loss = within(context, self._loss)
        stages = [
            PipelineStage(module, stage, self._count, self._device, group=self._axis.group)
            for stage, module in self._modules.items()
        ]
        if self._schedule in SINGLE:
            (stage,) = stages
            return SINGLE[self._schedule](stage, microbatches, loss)
        return MULTI[self._schedule](list(stages), microbatches, loss)


def within(context: Context, function: Callable) -> Callable:
    """The function, computed inside of a context made anew for every call, such as autocast."""

    @wraps(function)
    def inside(*args, **kwargs):
        with context():
            return function(*args, **kwargs)

    return inside
