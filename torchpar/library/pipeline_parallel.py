"""Pipeline parallelism by PyTorch: `torch.distributed.pipelining` has the schedules and moves the data.

A stage is some neighbouring blocks. The first stage also has the embeddings, the last the final norm and the
head. A rank has `layout.chunks` stages.

After a forward a stage sends its output (B, T, C) to the next stage. After a backward it sends the gradient
of its input to the stage before. gpipe runs all forwards of a step and then all backwards; 1f1b runs one of
each in turn. `schedule.step` runs the tasks of this rank, with their sends and receives.

It does not handle a weight that two stages share. `tied_weights` sums the gradients after the schedule. The
zero-bubble schedule is ZB1P, and finds the two halves of a backward in autograd's graph.

A passes, b rows of a rank, T positions.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
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
from torchpar.gpt_stages import GPTStages
from torchpar.tied_weights import pipeline_sharding

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI = {"interleaved": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble}


def run_stages(stages: Mapping[int, GPTStages], engine: Engine, *, mesh: Mesh, layout: Layout) -> Engine:
    """Run a rank's stages of a GPT, by their numbers along the model, with PyTorch's schedule.

    `engine.module` is the stages, plain or wrapped by DDP or FSDP2. PyTorch's stages let the wrappers reduce
    only in their last backward.
    """
    axis, last_stage = mesh[PP], stages[max(stages)]
    modules = list(engine.module) if isinstance(engine.module, nn.ModuleList) else [engine.module]
    divisor = 1.0  # of a microbatch's loss: their number, and in float16 also the loss scale

    def loss_of(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        return last_stage.mean_loss(logits_BTV, targets_BT) / divisor

    @cache
    def schedule_of(microbatches: int, *, evaluates: bool) -> Any:
        """One schedule each for training and evaluation: a shared one infers the messages' shapes again at
        every switch, by an extra forward and backward."""
        pipeline_stages = [
            PipelineStage(module, number, last_stage.stages, mesh.device, group=axis.group)
            for number, module in zip(stages, modules, strict=True)
        ]
        # `loss_of` divides by the number of microbatches, so the schedule does not divide gradients.
        if layout.schedule in SINGLE:
            return SINGLE[layout.schedule](pipeline_stages[0], microbatches, loss_of, scale_grads=False)
        return MULTI[layout.schedule](list(pipeline_stages), microbatches, loss_of, scale_grads=False)

    def run(
        batch: RankBatch, forward_context: Callable[[], AbstractContextManager], loss_scale: float = 1.0
    ) -> torch.Tensor:
        """Forward, and if gradients are enabled backward, of (A, b, T). Returns the mean loss, ()."""
        nonlocal divisor
        evaluates, microbatches = not torch.is_grad_enabled(), len(batch.inputs_ABT) * layout.microbatches
        divisor = microbatches / loss_scale
        for stage in stages.values():
            stage.forward_context = forward_context
        inputs, targets, *keys = (tensor.flatten(0, 1) for tensor in batch if tensor is not None)
        losses: list[torch.Tensor] = []
        first = (inputs,) if 0 in stages else ()
        last = {"target": targets, "losses": losses} if last_stage.stages - 1 in stages else {}
        dropout = dict(zip(("keys_B2",), keys, strict=False))
        schedule = schedule_of(microbatches, evaluates=evaluates)
        # All messages between stages.
        (schedule.eval if evaluates else schedule.step)(*first, **last, **dropout, return_outputs=False)
        total = torch.zeros((), dtype=torch.float64, device=mesh.device)
        for loss in losses:
            total += loss.detach()
        # The last stage has the loss: sum it over all stages.
        axis.all_reduce(total, purpose=LOSS)
        return total / loss_scale

    return replace(engine.with_sharding(pipeline_sharding(axis, engine.parameters)), run_pipeline=run)
