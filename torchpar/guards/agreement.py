"""Agreement of the ranks on which parameters were used at all."""

from collections.abc import Sequence

import torch

from compare.contract.communication import UNUSED
from torchpar.comm.collectives import Axis


def agree_on_use(
    used: Sequence[bool], axes: Sequence[Axis | None], *, device: torch.device | None
) -> list[bool]:
    """The parameters that have a gradient on any rank: one small all-reduce along each axis.

    Args:
        used: for each, whether this rank has one; as many, in the same order, on all ranks.
        axes: the ranks.
        device: of the gradients; any if there are none.
    """
    if not used:
        return []
    flags = torch.tensor(used, dtype=torch.int32, device=device)
    for axis in axes:
        if axis and axis.size > 1:
            axis.all_reduce(flags, purpose=UNUSED, op="max")
    return flags.bool().tolist()
