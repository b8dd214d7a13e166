"""Runner of a GPT's stages in a `PipelineParallel`.

A accumulated passes, b sequences of a data-parallel share, M microbatches of a step, B sequences of one,
T positions, C embedding.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from compare.pipeline.schedules import make_schedule
from compare.spec.experiment import Layout
from torchpar.comm.collectives import Axis
from torchpar.gpt_stages import GPTStages, OneStage
from torchpar.manual.pipeline_parallel import PipelineParallel, evaluate_stages
from torchpar.parallel_model import ParallelModel
from torchpar.state import RankBatch


def make_runner(
    part: GPTStages, parallel: ParallelModel, *, axis: Axis, layout: Layout
) -> Callable[..., torch.Tensor]:
    """A function for `ParallelModel.run_pipeline`: from a batch (A, B, T) to its mean loss, ().

    Args:
        part: this rank's stages, which `parallel.module` is, or wraps.
        parallel: these stages, parallel over the other axes.
        axis: the pipeline's ranks.
        layout: schedule, chunks and microbatches.
    """

    @functools.cache  # how many passes a step has is seen at the first
    def make_pipeline(microbatches: int) -> PipelineParallel:
        return PipelineParallel(
            {stage: OneStage(parallel.module, stage) for stage in part.blocks_of},
            schedule=make_schedule(
                layout.schedule, ranks=axis.size, microbatches=microbatches, chunks=layout.chunks
            ),
            loss=part.mean_loss,
            boundary=functools.partial(boundary, part=part, layout=layout),
            group=axis,
            no_sync=parallel.no_sync,
        )

    def run(batch: RankBatch, forward_context: Callable[[], AbstractContextManager]) -> torch.Tensor:
        inputs_MBT, targets_MBT, *keys_MB2 = microbatches_of(batch, layout)
        pipeline = make_pipeline(len(inputs_MBT))
        also = list(zip(*keys_MB2, strict=True))
        return pipeline.run(inputs_MBT, targets_MBT, also=also, forward_context=forward_context)

    return run


def make_evaluation(
    part: GPTStages, parallel: ParallelModel, *, axis: Axis, layout: Layout
) -> Callable[..., torch.Tensor]:
    """A function for `ParallelModel.evaluate_pipeline`: a batch to its loss, (). As `make_runner`."""

    def evaluate(batch: RankBatch, forward_context: Callable[[], AbstractContextManager]) -> torch.Tensor:
        inputs_MBT, targets_MBT = microbatches_of(batch, layout)
        return evaluate_stages(
            {stage: OneStage(parallel.module, stage) for stage in part.blocks_of},
            inputs_MBT,
            targets_MBT,
            count=part.stages,
            loss=part.mean_loss,
            boundary=functools.partial(boundary, part=part, layout=layout),
            axis=axis,
            forward_context=forward_context,
        )

    return evaluate


def microbatches_of(batch: RankBatch, layout: Layout) -> list[tuple[torch.Tensor, ...]]:
    """Of a step's inputs (A, b, T), targets and keys, if it has any, every microbatch's (B, ...)."""
    size = batch.inputs_ABT.shape[1] // layout.microbatches
    return [tensor.flatten(0, 1).split(size) for tensor in batch if tensor is not None]


def boundary(stage: int, ids_BT: torch.Tensor, *, part: GPTStages, layout: Layout) -> torch.Tensor:
    """The residual stream (B, T, C) between two stages for a microbatch of ids, without data."""
    count, length = ids_BT.shape
    length //= layout.tp if layout.sequence_parallel else 1
    return torch.empty(count, length, part.width, dtype=part.dtype, device="meta")
