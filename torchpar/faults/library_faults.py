"""Mistakes that a user of PyTorch's own wrappers can make."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import RowwiseParallel

from compare.contract.faults import Need
from torchpar import library
from torchpar.faults.run_faults import zeroed_before_each_pass
from torchpar.library import data_parallel, tensor_parallel

BY_DDP = Need(
    holds=lambda layout: layout.dp_replicate > 1 and layout.zero < 2 and layout.tp == 1,
    otherwise="DistributedDataParallel reduces nothing: give layout.dp_replicate = 2 or more, layout.tp = 1 "
    "and layout.zero = 0 or 1",
)
SHARDED_PARAMETERS = Need(
    holds=lambda layout: layout.zero > 1,
    otherwise="ZeroRedundancyOptimizer updates whole parameters: give layout.zero = 2 or more",
)
SUMMED_BY_AUTOGRAD = Need(
    holds=lambda layout: layout.zero < 2,
    otherwise="FSDP2 adds up the gradients of passes where no user reaches them: give layout.zero = 0 or 1",
)


def dropped_all_reduce() -> AbstractContextManager:
    """Gradients stay each replica's own."""
    return _ddp_with_hook(_keep_local)


def sum_for_mean() -> AbstractContextManager:
    """The sum over the replicas is not divided."""
    return _ddp_with_hook(_sum)


def dropped_tp_all_reduce() -> AbstractContextManager:
    """Each rank goes on with its own part of what attention and MLP add to the stream."""
    return patch.object(tensor_parallel, "RowwiseParallel", unsummed)


def missing_norm_psum() -> AbstractContextManager:
    """Gradients of LayerNorms stay those of each rank's part of the sequence."""
    return patch.object(library, "complete_gradients", take_parts_for_sums)


@contextmanager
def overwritten_microbatch() -> Generator[None]:
    """Each pass's gradient, and in a pipeline each microbatch's, takes the place of those before it."""
    right = PipelineStage.backward_one_chunk

    def overwriting(self: PipelineStage, *args: Any, **kwargs: Any) -> Any:
        self.submod.zero_grad()
        return right(self, *args, **kwargs)

    with patch.object(PipelineStage, "backward_one_chunk", overwriting), zeroed_before_each_pass():
        yield


def unsummed(**layouts: Any) -> RowwiseParallel:
    """Linear layers whose output stays a partial sum; the embedding, which names its input, stays right."""
    return RowwiseParallel(**(layouts if "input_layouts" in layouts else {"output_layouts": Partial()}))


def take_parts_for_sums(model: nn.Module) -> None:
    """Declare gradients that are still to be summed complete as they are."""
    for parameter in model.parameters():
        gradient = parameter.grad
        assert isinstance(parameter, DTensor)
        if isinstance(gradient, DTensor) and any(how.is_partial() for how in gradient.placements):
            part, mesh = gradient.to_local(), gradient.device_mesh
            parameter.grad = DTensor.from_local(part, mesh, parameter.placements, run_check=False)


def _ddp_with_hook(hook: Callable[[dist.ProcessGroup, Any], torch.futures.Future]) -> AbstractContextManager:
    """DDP with another communication hook: the hook takes a bucket and promises its reduced buffer.

    The hooks are not annotated: DDP would insist on `torch.distributed`'s own class.
    """

    class Faulty(data_parallel.DistributedDataParallel):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.register_comm_hook(self.process_group, hook)

    return patch.object(data_parallel, "DistributedDataParallel", Faulty)


def _keep_local(group: dist.ProcessGroup, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _sum(group: dist.ProcessGroup, bucket):
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
