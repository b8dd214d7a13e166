"""Rows of the fused q, k, v, dealt out by rank: then a contiguous part has whole heads.

The fused weight is (3 C, C), and a cut of its rows would part q from v. They are reordered once, so that each
rank's contiguous part holds the q, k and v of its own heads. Whole tensors are put back in order.
"""

import torch
from torch import nn

from compare.numerics.parameters import QKV
from torchpar.parallel_model import TensorsByName

FUSED = ".attn.c_attn."


@torch.no_grad()
def deal_heads(fused: nn.Module, ranks: int) -> None:
    """Reorder the rows of a fused q, k, v layer."""
    for parameter in fused.parameters():
        parameter.copy_(parameter[head_order(len(parameter), ranks)])


def restore_order(tensors: TensorsByName, *, ranks: int) -> TensorsByName:
    """Whole weights, gradients or moments by name, each q, k, v in the model's own order again."""
    return {
        name: whole[head_order(len(whole), ranks).argsort()] if FUSED in name else whole
        for name, whole in tensors.items()
    }


def head_order(rows: int, ranks: int) -> torch.Tensor:
    """Rows (q, k, v) by rank as rank by (q, k, v)."""
    return torch.arange(rows).view(QKV, ranks, -1).transpose(0, 1).flatten()
