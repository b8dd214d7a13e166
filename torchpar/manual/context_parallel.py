"""Context parallelism by hand: each rank has some of the positions, and its queries see the keys of all.

    context      forward                              backward
    allgather    all-gather K, V                      reduce-scatter dK, dV
    ulysses      all-to-all q, k, v and then y        all-to-all their gradients
    ring         n - 1 hops of K, V                   n - 1 hops of K, V, and n hops of dK, dV

In a hop a rank sends the K, V that it has to the next rank, and attends to them meanwhile. All hops are in
`ring`: `pass_around` sends K, V, and backward sends dK, dV. Each query keeps a softmax over the keys so far.
A new block is merged by its share of the sum of exponentials, so the order of the blocks does not matter.
After n - 1 hops every query has seen all keys, and no rank has gathered them. In backward dK, dV follow their
K, V: each rank adds its part, and after n hops they are back.

All other layers treat each position by itself, and send nothing. Weights are replicated over cp, and their
gradients are means over cp as over replicas.

A rank has one chunk of neighbouring positions. With zigzag it has two, one from each end of the sequence, so
that the causal mask gives all ranks the same work.

n ranks of cp, B batch, T all positions, t this rank's positions, c positions of a chunk, S positions that a
chunk sees. H heads, K heads of keys and values, h this rank's heads of q, k and v, D head_dim.
Sources: Llama 3 (arXiv 2407.21783, section 3.3.2), DeepSpeed-Ulysses (arXiv 2309.14509).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

from compare.contract.communication import ACTIVATION_GRADIENTS, ACTIVATIONS
from compare.spec.experiment import Layout
from torchpar.comm.collectives import Axis
from torchpar.manual.ring import RingAttention, chunks_of
from torchpar.model import GPT
from torchpar.positions import set_local_positions

Mask = Callable[[int, int, torch.dtype, torch.device], torch.Tensor]
"""`causal_mask`, with a cache."""


def split_sequence(model: GPT, axis: Axis, layout: Layout, device: torch.device) -> None:
    """Give a GPT this rank's positions, and replace its attention cores by the layout's."""
    set_local_positions(model, layout, rank=axis.rank, device=device)
    cores = [block.get_submodule("attn.core") for block in model.blocks]
    has_weights = model.config.dropout or model.config.attention == "dense"
    if layout.context == "allgather" and has_weights:  # whole rows of weights: all need one mask
        position_T = torch.arange(model.config.block_size, device=device)
        seen_tT = model.positions(len(position_T) // axis.size, device=device)[:, None] >= position_T
        for core in cores:
            core.seen_TS = seen_tT
    mask = cache(causal_mask)  # one for all layers, because autograd saves it in each
    for block, core in zip(model.blocks, cores, strict=True):
        block.set_submodule("attn.core", CORES[layout.context](core, axis, layout, mask))


class GatherPositions(Function):
    """All-gather K and V along the positions in forward, reduce-scatter their gradients in backward."""

    @staticmethod
    def forward(ctx: Any, kv_2BtKD: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        # The queries of this rank see the keys of all ranks: gather K and V in one message.
        return axis.all_gather_dim(kv_2BtKD, 2, purpose=ACTIVATIONS)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor):
        # The queries of all ranks saw these keys: sum dK and dV, and return to each rank its positions.
        return ctx.axis.reduce_scatter_dim(gradients[0], 2, purpose=ACTIVATION_GRADIENTS), None


class GatheredAttention(nn.Module):
    """Attention of this rank's queries to the gathered keys and values of all positions."""

    def __init__(self, core: nn.Module, axis: Axis, layout: Layout, mask: Mask):
        super().__init__()
        self.core, self.axis, self.layout, self.mask = core, axis, layout, mask

    def forward(self, q_BtHD: torch.Tensor, *k_v_BtKD: torch.Tensor) -> torch.Tensor:
        """q (B, t, H, D), k and v (B, t, K, D), and with dropout the sequences' keys, to y (B, t, H, D)."""
        kv_2BTKD = GatherPositions.apply(torch.stack(k_v_BtKD[:2]), self.axis)
        if self.layout.zigzag:  # from the order of the ranks to the order of the sequence
            chunks = kv_2BTKD.chunk(2 * self.axis.size, dim=2)  # 0, 2n - 1, 1, 2n - 2, ..., n - 1, n
            kv_2BTKD = torch.cat([*chunks[::2], *chunks[::-2]], dim=2)
        keys_B2 = k_v_BtKD[2:]
        if keys_B2 or self.core.is_dense:
            return self.core(q_BtHD, *kv_2BTKD, *keys_B2)
        q_BHtD, k_BKTD, v_BKTD = (x.transpose(1, 2) for x in (q_BtHD, *kv_2BTKD.unbind()))
        chunks, is_grouped = chunks_of(self.axis.rank, self.layout), q_BHtD.shape[1] > k_BKTD.shape[1]
        y_BHcD = []
        for chunk, q_BHcD in zip(chunks, q_BHtD.chunk(len(chunks), dim=2), strict=True):
            size = q_BHcD.shape[2]
            end = (chunk + 1) * size  # the queries of a chunk see the keys up to its end
            k_BKSD, v_BKSD = k_BKTD[:, :, :end], v_BKTD[:, :, :end]
            mask_cS = self.mask(size, end, q_BHcD.dtype, q_BHcD.device)
            y_BHcD.append(
                F.scaled_dot_product_attention(
                    q_BHcD, k_BKSD, v_BKSD, attn_mask=mask_cS, enable_gqa=is_grouped
                )
            )
        return torch.cat(y_BHcD, dim=2).transpose(1, 2)


def causal_mask(queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Mask of the last queries, (queries, keys): 0, or -inf where the key comes later.

    On a GPU it only says so, has no memory, and allows FlashAttention. There float64 has no fused kernel.
    """
    if device.type == "cuda" and dtype != torch.float64:
        from torch.nn.attention.bias import causal_lower_right  # seconds of imports

        return causal_lower_right(queries, keys)
    return torch.full((queries, keys), -torch.inf, dtype=dtype, device=device).triu(keys - queries + 1)


class AllToAll(Function):
    """Split dim `split` among the ranks and join the chunks along dim `join`; backward swaps the dims."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, split: int, join: int) -> torch.Tensor:
        ctx.axis, ctx.split, ctx.join = axis, split, join
        # Each rank sends every other rank the chunk that it needs, and receives as much.
        return axis.all_to_all_dims(x, split=split, join=join, purpose=ACTIVATIONS)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor):
        # The gradient of a chunk returns to the rank that sent it.
        how = {"split": ctx.join, "join": ctx.split, "purpose": ACTIVATION_GRADIENTS}
        return ctx.axis.all_to_all_dims(gradients[0], **how), None, None, None


class UlyssesAttention(nn.Module):
    """Attention to all positions with some of the heads, as the core computes it on one device."""

    def __init__(self, core: nn.Module, axis: Axis, layout: Layout, mask: Mask):
        super().__init__()
        self.core, self.axis = core, axis

    def forward(
        self, q_BtHD: torch.Tensor, k_BtKD: torch.Tensor, v_BtKD: torch.Tensor, *keys_B2: torch.Tensor
    ) -> torch.Tensor:
        """q (B, t, H, D), k and v (B, t, K, D), and with dropout the sequences' keys, to y (B, t, H, D)."""
        ranks, q_k_v = self.axis.size, (q_BtHD, k_BtKD, v_BtKD)
        # One message for q, k and v: the heads of each rank side by side.
        by_rank = zip(*(x.chunk(ranks, dim=2) for x in q_k_v), strict=True)
        heads_first = torch.cat([x for of_rank in by_rank for x in of_rank], dim=2)
        qkv_BThD = AllToAll.apply(heads_first, self.axis, 2, 1)  # from positions to heads
        y_BThD = self.core(*qkv_BThD.split([x.shape[2] // ranks for x in q_k_v], dim=2), *keys_B2)
        return AllToAll.apply(y_BThD, self.axis, 1, 2)  # from heads to positions


# The ring's messages are in `ring`: in `pass_around`, and in the backward.
CORES = {"allgather": GatheredAttention, "ring": RingAttention, "ulysses": UlyssesAttention}
