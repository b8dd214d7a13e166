"""Pipeline parallelism by placements: stages are a dim of a DTensor, and a shift along it is the network.

    x_S   (S, ...), its first dim split over pp: each of S ranks has the microbatch of its stage
    tick  every rank computes its stage, and the results shift by one: a new microbatch enters, one leaves

Autograd makes the backward pipeline, in reverse: GPipe. But DTensor has no rule for a shift along a split
dim: to split another dim, roll, and split the stages again is two all-to-alls, which on a CPU it makes of
gathers (2.13). So torch-compiler refuses pipelines, and only a test runs this.
"""

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor, Shard

from torchpar.dtensors import local_part


def run_pipeline(
    stage: Callable[[torch.Tensor], torch.Tensor], x_S: DTensor, x_M: torch.Tensor
) -> torch.Tensor:
    """Microbatches x_M (M, ...) through all stages: right on the last rank. Idle stages compute on x_S."""
    stages, is_first, left = len(x_S), x_S.device_mesh.get_local_rank() == 0, []
    for tick in range(len(x_M) + stages - 1):
        enters = torch.tensor(is_first and tick < len(x_M), device=x_M.device)  # no `if`: ranks trace alike
        y = stage(torch.where(enters, x_M[min(tick, len(x_M) - 1)], x_S.to_local()[0]))
        left.append(y)
        results = local_part(y[None], x_S.device_mesh, x_S.placements).redistribute(placements=[Shard(1)])
        shifted = local_part(torch.roll(results.to_local(), 1, 0), x_S.device_mesh, results.placements)
        x_S = shifted.redistribute(placements=x_S.placements)
    return torch.stack(left[stages - 1 :])
