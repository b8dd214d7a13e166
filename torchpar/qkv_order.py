"""The order of the rows of a fused q, k, v that tensor parallelism splits as one weight.

c_attn is one (3 C, C) weight: q, then k, then v. `Shard(0)` would give the first rank q and the
last rank v. So the rows are permuted once: each rank's contiguous rows have the q, k and v of its own heads.
Gathered tensors are permuted back. With grouped queries each group has its k and v behind it, so the order
stays.
"""

import torch
from torch import nn

from torchpar.model import GPT, CausalSelfAttention

FUSED = ".attn.c_attn."
"""In the names of the parameters that are permuted."""


@torch.no_grad()
def permute_qkv_by_rank(model: GPT, ranks: int) -> None:
    """Permute the rows of each c_attn from (q, k, v) by rank to rank by (q, k, v)."""
    for block in model.blocks:
        for parameter in block.get_submodule("attn.c_attn").parameters():
            parameter.copy_(parameter[_order(len(parameter), ranks, qkv_parts(model))])


def unpermute_qkv(tensor: torch.Tensor, ranks: int, parts: int) -> torch.Tensor:
    """The inverse, for a full weight, bias, gradient or moment of c_attn; `parts` are `qkv_parts`."""
    return tensor[_order(len(tensor), ranks, parts).argsort()]


def qkv_parts(model: nn.Module) -> int:
    """How many parts of the rows heads are cut from: q, k and v, or one with grouped queries."""
    return next(m.qkv_parts for m in model.modules() if isinstance(m, CausalSelfAttention))


def _order(rows: int, ranks: int, parts: int) -> torch.Tensor:
    return torch.arange(rows).view(parts, ranks, -1).transpose(0, 1).flatten()
