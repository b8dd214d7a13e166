"""The first rank's values on every rank: where data parallelism starts from."""

from collections.abc import Iterable, Sequence

import torch

from compare.contract.communication import REPLICATE
from torchpar.comm.collectives import Axis


@torch.no_grad()
def replicate(tensors: Iterable[torch.Tensor], axes: Sequence[Axis | None]) -> None:
    """Broadcast tensors from the first rank.

    Args:
        tensors: of any shape; the same number, shapes and order on all ranks.
        axes: one after the other; each passes on what came along the one before.
    """
    axes = [axis for axis in axes if axis and axis.size > 1]
    for tensor in tensors:
        sent = tensor.contiguous()  # itself, or a copy of a strided one
        for axis in axes:
            axis.broadcast(sent, purpose=REPLICATE)
        if sent is not tensor:
            tensor.copy_(sent)
