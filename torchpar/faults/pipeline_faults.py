"""Faults that only a pipeline can have, for `torchpar.faults` to plant; both engines'."""

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from torch import nn

from torchpar import gpt_stages
from torchpar.comm.collectives import Axis
from torchpar.library.pipeline_parallel import PipelineStage
from torchpar.manual.pipeline.stage import Stage


def stale_tied_copy(engine: str) -> AbstractContextManager:
    """The last stage does not add the first stage's gradient to that of its copy of the embedding."""
    right = gpt_stages.sum_tied_gradients

    def stale(parameter: nn.Parameter, axis: Axis, *, ranks: tuple[int, int]) -> None:
        assert parameter.grad is not None
        own = parameter.grad.clone()
        right(parameter, axis, ranks=ranks)
        if axis.rank == ranks[1]:
            parameter.grad = own

    return patch.object(gpt_stages, "sum_tied_gradients", stale)


def overwritten_microbatch(engine: str) -> AbstractContextManager:
    """Each microbatch's gradient takes the place of those before it."""
    is_library = engine == "torch-library"
    owner, name = (PipelineStage, "backward_one_chunk") if is_library else (Stage, "backward")
    right = getattr(owner, name)

    def overwriting(stage: Any, *args: Any, **kwargs: Any) -> Any:
        module = stage.submod if is_library else stage.module
        module.zero_grad()
        return right(stage, *args, **kwargs)

    return patch.object(owner, name, overwriting)
