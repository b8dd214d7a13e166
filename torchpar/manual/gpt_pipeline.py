"""The pipeline of a GPT: its stages, the tied embedding, and what is gathered over them for the record.

A accumulated passes, b sequences of a data-parallel share, M microbatches of a step, B sequences of one,
T positions, C embedding.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from compare.contract.experiment import Layout
from compare.contract.schedules import make_schedule
from torchpar.collectives import Axis
from torchpar.manual.pipeline_parallel import PipelineParallel, sum_tied_gradients
from torchpar.plan import Named, Plan
from torchpar.stages import TIED, GPTStages, OneStage


def gpt_pipeline(part: GPTStages, plan: Plan, *, axis: Axis, layout: Layout) -> Plan:
    """The plan of one rank's stages as a part of the whole pipeline's.

    Args:
        part: this rank's stages, which `plan.module` is, or wraps.
        plan: what is done to them over the other axes.
        axis: the pipeline's ranks.
        layout: schedule, chunks and microbatches.
    """
    tied = plan.parameters.get(TIED)
    ends = (0, axis.size - 1)

    def finish() -> None:
        # Both copies of the tied weight are cut alike, so that their pieces can be added up. But ZeRO-1 cuts
        # through all of a rank's parameters as one: there the whole gradients are added up first.
        if tied is not None and layout.zero == 1:
            sum_tied_gradients(part.get_parameter(TIED), axis, ranks=ends)
        plan.finish_gradient_synchronization()
        if tied is not None and layout.zero != 1:
            sum_tied_gradients(tied, axis, ranks=ends)

    return replace(
        plan,
        run_pipeline=_make_runner(part, plan, axis=axis, layout=layout),
        finish_gradient_synchronization=finish,
        sharded_over=lambda name: (*plan.sharded_over(name), axis),
        copies=frozenset({TIED} if axis.rank == axis.size - 1 else ()),
        gathers=(*plan.gathers, functools.partial(gather_stages, axis=axis)),
    )


def _make_runner(part: GPTStages, plan: Plan, *, axis: Axis, layout: Layout) -> Callable[..., torch.Tensor]:
    @functools.cache  # how many passes a step has is seen at the first
    def make_pipeline(microbatches: int) -> PipelineParallel:
        return PipelineParallel(
            {stage: OneStage(plan.module, stage) for stage in part.blocks_of},
            schedule=make_schedule(
                layout.schedule, ranks=axis.size, microbatches=microbatches, chunks=layout.chunks
            ),
            loss=part.mean_loss,
            boundary=functools.partial(boundary, part=part, layout=layout),
            group=axis,
            no_sync=plan.no_sync,
        )

    def run(
        inputs_AbT: torch.Tensor,
        targets_AbT: torch.Tensor,
        forward_context: Callable[[], AbstractContextManager],
    ) -> torch.Tensor:
        size = inputs_AbT.shape[1] // layout.microbatches
        inputs_MBT, targets_MBT = (tensor.flatten(0, 1).split(size) for tensor in (inputs_AbT, targets_AbT))
        pipeline = make_pipeline(len(inputs_MBT))
        return pipeline.run(inputs_MBT, targets_MBT, forward_context=forward_context)

    return run


def gather_stages(parts: Named, *, axis: Axis) -> Named:
    """The tensors of all stages by name, the first stage's copy of the tied ones; for the record."""
    stages = axis.all_gather_objects({name: tensor.cpu() for name, tensor in parts.items()})
    return {name: tensor for stage in reversed(stages) for name, tensor in stage.items()}


def boundary(stage: int, ids_BT: torch.Tensor, *, part: GPTStages, layout: Layout) -> torch.Tensor:
    """What passes between two stages for a microbatch of these ids: the stream (B, T, C), without data."""
    count, length = ids_BT.shape
    length //= layout.tp if layout.sequence_parallel else 1
    return torch.empty(count, length, part.width, dtype=part.dtype, device="meta")
