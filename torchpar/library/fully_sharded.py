"""Sharded data parallelism by PyTorch: ZeroRedundancyOptimizer for ZeRO-1, FSDP2 for ZeRO-2 and 3.

    zero   forward                   backward                                       after backward
    1      -                         DDP all-reduces the gradients                  update own parameters,
                                                                                    broadcast them
    2      all-gather, keep          reduce-scatter, in the last pass; free         update shards
    3      all-gather, free          all-gather; last pass: reduce-scatter; free    update shards

FSDP2 moves one unit at a time: a block, or the modules outside of the blocks. `fully_shard` makes a unit, and
its hooks send all of this. Gradients add up in full, and only the last pass reduce-scatters them (`no_sync`).
ZeRO-2 gathers parameters once a pass (SHARD_GRAD_OP in FSDP1). ZeRO-3 gathers them in forward and again in
backward (FULL_SHARD).
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
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
    policy: MixedPrecisionPolicy | None = None,
) -> None:
    """Shard a GPT's parameters, gradients and optimizer state, and fill it block by block.

    Parameters become DTensors, sharded along dim 0. Gradients are averaged over the mesh: one-dimensional, or
    (replicas, shards). One shard is plain replication. `shard_first` may make units inside of a block. With a
    `policy` the factors of products are gathered in its dtype, and the norms of a block are another unit.
    """
    apart = set[nn.Parameter]()  # parameters of these units
    how: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard_after_forward}
    for block in model.blocks:
        fill([block])
        shard_first(block)
        if policy:
            fully_shard([module for name, module in block.named_children() if name.startswith("ln_")], **how)
        units = (unit for unit in block.modules() if isinstance(unit, FSDPModule))
        apart |= {parameter for unit in units for parameter in unit.parameters()}
        fully_shard(block, ignored_params=apart, **how, **({"mp_policy": policy} if policy else {}))
    # The root has the embeddings and the head. Backward begins with them, so they stay after forward.
    fill([model])
    fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=apart)


def reshard_parameters(model: nn.Module) -> None:
    """Free the gathered parameters after a forward without a backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def no_sync(model: nn.Module) -> Generator[None]:
    """Only accumulate gradients: around forward and backward of every pass of a step except the last."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """ZeRO-1: each rank keeps the state of some parameters, updates them, and broadcasts them.

    It partitions whole parameters, the largest first. A parameter that is larger than an even share, such as
    an embedding, makes the shares uneven, and each rank needs room for the largest.
    """

    def __init__(
        self, params, optimizer_cls: type[torch.optim.Optimizer], *, group: ProcessGroup | None, **kwargs
    ):
        super().__init__(params, optimizer_cls, process_group=group, parameters_as_bucket_view=True, **kwargs)
        self.state = self.optim.state  # ZeroRedundancyOptimizer leaves its own empty
