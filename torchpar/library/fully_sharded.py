"""Sharded data parallelism by PyTorch: ZeroRedundancyOptimizer for ZeRO-1, FSDP2 `fully_shard` for the rest.

FSDP2 keeps parameters split between steps in both stages. The choice is whether they are gathered once a step
(ZeRO-2, SHARD_GRAD_OP) or again for backward (ZeRO-3, FULL_SHARD).
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from torchpar.gpt_stages import GPTStages
from torchpar.model import GPT


def shard_parameters(
    model: GPT | GPTStages,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool,
    fill: Callable[[Sequence[nn.Module]], None],
    shard_first: Callable[[nn.Module], None] = lambda block: None,
) -> None:
    """Fill a GPT block by block, and split its parameters, gradients and optimizer state over ranks.

    The parameters become DTensors, split along dim 0 and padded where the ranks do not divide it. The
    gradients are the mean over all of the mesh: one-dimensional, or (replicas, shards). A shard axis of one
    is plain replication, which DistributedDataParallel does not offer for DTensors. What `shard_first` makes
    units of inside a block stays theirs.
    """
    apart = set[nn.Parameter]()
    for block in model.blocks:
        fill([block])
        shard_first(block)
        units = (unit for unit in block.modules() if isinstance(unit, FSDPModule))
        apart |= {parameter for unit in units for parameter in unit.parameters()}
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, ignored_params=apart)
    # Backward begins where forward ended: with the root's own parameters, the embeddings.
    fill([model])
    fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=apart)


def reshard_parameters(model: nn.Module) -> None:
    """Free parameters after a forward without a backward: the root's, and with ZeRO-2 all blocks'."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def no_sync(model: nn.Module) -> Generator[None]:
    """Only accumulate: put it around forward and backward of every pass of a step but the last."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """ZeRO-1: each rank keeps the state of some parameters, updates these, and broadcasts them.

    Whole parameters are partitioned, the largest first: where one of them, such as an embedding, is more than
    a rank's share, the shares differ, and a rank must have room for the largest.
    """

    def __init__(
        self, params, optimizer_cls: type[torch.optim.Optimizer], *, group: ProcessGroup | None, **kwargs
    ):
        super().__init__(params, optimizer_cls, process_group=group, parameters_as_bucket_view=True, **kwargs)
        self.state = self.optim.state  # this rank's; else it would stay empty
