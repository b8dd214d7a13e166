"""Pipeline parallelism by PyTorch: `torch.distributed.pipelining` has the schedules and moves the data.

It does not know of a weight that two stages share: its gradients are summed after the schedule
(`gpt_stages.sum_tied_gradients`). The zero-bubble schedule is ZB1P, and finds the two halves of a backward in
autograd's graph.

A passes, b rows of a rank, T positions.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, wraps
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
from compare.spec.axes import PP
from compare.spec.experiment import Layout
from torchpar.batch import RankBatch
from torchpar.comm.mesh import Mesh
from torchpar.engine import Engine
from torchpar.gpt_stages import GPTStages, pipeline

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI = {"interleaved": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble}
Context = Callable[[], AbstractContextManager]


def run_stages(stages: Mapping[int, GPTStages], engine: Engine, *, mesh: Mesh, layout: Layout) -> Engine:
    """Let PyTorch's schedule run a rank's stages of a GPT, given by their numbers along the model.

    `engine.module` has them, plain or wrapped by DDP or FSDP2, which PyTorch's stages hold back from
    reducing before their last backward.
    """
    axis, part = mesh[PP], stages[max(stages)]
    modules = list(engine.module) if isinstance(engine.module, nn.ModuleList) else [engine.module]
    context: Context = nullcontext
    scale, microbatches = 1.0, 1

    def within(function: Callable) -> Callable:
        """The function, computed inside of a context made anew for every call, such as autocast."""

        @wraps(function)
        def inside(*args, **kwargs):
            with context():
                return function(*args, **kwargs)

        return inside

    for module in modules:
        module.forward = within(module.forward)

    def loss_of(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        with context():
            return part.mean_loss(logits_BTV, targets_BT) * scale / microbatches

    @cache
    def schedule_of(microbatches: int, *, evaluates: bool) -> Any:
        """One for both would learn the messages' shapes anew whenever they change places, which is a forward
        and backward more, and one more reduction of all gradients by DDP."""
        own = [
            PipelineStage(module, stage, part.stages, mesh.device, group=axis.group)
            for stage, module in zip(stages, modules, strict=True)
        ]
        # `loss_of` divides by the number of microbatches: not the schedule, after backward.
        if layout.schedule in SINGLE:
            return SINGLE[layout.schedule](own[0], microbatches, loss_of, scale_grads=False)
        return MULTI[layout.schedule](list(own), microbatches, loss_of, scale_grads=False)

    def run(batch: RankBatch, forward_context: Context, loss_scale: float = 1.0) -> torch.Tensor:
        """Forward, and with gradients backward, of (A, b, T). Returns the mean loss, ()."""
        nonlocal context, microbatches, scale
        context, scale, evaluates = forward_context, loss_scale, not torch.is_grad_enabled()
        microbatches = len(batch.inputs_ABT) * layout.microbatches
        inputs, targets, *keys = (tensor.flatten(0, 1) for tensor in batch if tensor is not None)
        losses: list[torch.Tensor] = []
        first = (inputs,) if 0 in stages else ()
        last = {"target": targets, "losses": losses} if part.stages - 1 in stages else {}
        also = dict(zip(("keys_B2",), keys, strict=False))
        schedule = schedule_of(microbatches, evaluates=evaluates)
        (schedule.eval if evaluates else schedule.step)(*first, **last, **also, return_outputs=False)
        total = torch.zeros((), dtype=torch.float64, device=mesh.device)
        for share in losses:
            total += share.detach()
        axis.all_reduce(total, purpose=LOSS)
        return total / scale

    return replace(engine.with_sharding(pipeline(axis, engine.parameters)), run_pipeline=run)
