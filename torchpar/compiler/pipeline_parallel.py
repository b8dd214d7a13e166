"""Pipeline parallelism by placements: stages are a dim of a DTensor, and a shift along it is the network.

One tensor holds a microbatch for each stage, and its first dim is split over pp. A tick is the same function
on every rank's own part, and a shift by one. The derivative, in reverse, is the backward pipeline: GPipe.

DTensor has no rule for a shift along a dim that is split: its `roll` gathers all stages first. Said in two
placements it moves no more than it must: split another dim, roll, split the stages again. That is two
all-to-alls where a neighbour's message would do, of twice its bytes, and they wait for all ranks. So
torch-compiler refuses pipelines of its own model (`compare.spec.engines.torch`), and this serves any stages.

Legend: S stages, one on each rank, M microbatches; `...` is what a microbatch has.
"""

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor, Shard

from compare.spec.axes import PP
from torchpar.compiler.placement import local_part

AXIS = PP
STAGE_DIM, OTHER_DIM = 0, 1


def run_pipeline(
    stage: Callable[[torch.Tensor], torch.Tensor], x_S: DTensor, x_M: torch.Tensor
) -> torch.Tensor:
    """Take microbatches through all stages.

    Args:
        stage: this rank's, (...) -> (...).
        x_S: (S, ...), split by stage: what idle stages begin with, such as zeros.
        x_M: (M, ...), on all ranks: what enters the first stage.

    Returns:
        (M, ...): what leaves the last stage, on the rank that has it; on others what they had in those ticks.
    """
    stages, own = x_S.shape[STAGE_DIM], x_S.device_mesh.get_local_rank()
    left = []
    for tick in range(len(x_M) + stages - 1):
        y = x_S.to_local()[0]
        if own == 0 and tick < len(x_M):
            y = x_M[tick]
        y = stage(y)
        if tick >= stages - 1:
            left.append(y)
        x_S = shift(local_part(y[None], x_S.device_mesh, x_S.placements), 1)
    return torch.stack(left)


def shift(x_S: DTensor, by: int) -> DTensor:
    """Each stage gets what the one `by` places before it has, around the ring; nothing is gathered."""
    turned = x_S.redistribute(placements=[Shard(OTHER_DIM)])
    rolled = torch.roll(turned.to_local(), by, STAGE_DIM)
    return local_part(rolled, x_S.device_mesh, turned.placements).redistribute(placements=x_S.placements)
