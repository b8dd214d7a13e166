"""Pipeline parallelism by placements: stages are a dim of a DTensor, and a shift along it is the network.

One tensor holds a microbatch for each stage, and its first dim is split over pp. A tick is the same function
on every rank's own part, and a shift by one. The derivative, in reverse, is the backward pipeline: GPipe.

DTensor has no rule for a shift along a dim that is split: its `roll` gathers all stages first. Said in two
placements, to split another dim, roll, and split the stages again, it is two all-to-alls, of twice a
message's bytes; and on a CPU DTensor makes each of them a gather and a cut (2.13). So torch-compiler refuses
pipelines of its own model (`compare.spec.engines.registry`), and this is to try it, with any stages.

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
        x_S: (S, ...), split by stage: what idle stages compute on. S divides the first dim of `...`.
        x_M: (M, ...), on all ranks: what enters the first stage.

    Returns:
        (M, ...): what leaves the last stage, on the rank that has it; others return what they had then.
    """
    stages, is_first = len(x_S), x_S.device_mesh.get_local_rank() == 0
    left = []
    for tick in range(len(x_M) + stages - 1):
        # By value, and on every rank: else backward would leave a shift out on one, for which others wait.
        enters = torch.tensor(is_first and tick < len(x_M), device=x_M.device)
        y = stage(torch.where(enters, x_M[min(tick, len(x_M) - 1)], x_S.to_local()[0]))
        left.append(y)
        x_S = shift(local_part(y[None], x_S.device_mesh, x_S.placements), 1)
    return torch.stack(left[stages - 1 :])


def shift(x_S: DTensor, by: int) -> DTensor:
    """Each stage gets what the one `by` places before it has, around the ring."""
    turned = x_S.redistribute(placements=[Shard(OTHER_DIM)])
    rolled = torch.roll(turned.to_local(), by, STAGE_DIM)
    return local_part(rolled, x_S.device_mesh, turned.placements).redistribute(placements=x_S.placements)
