"""Ring attention by hand: K and V pass from rank to rank, and no rank gathers them.

    hop          compute                                        meanwhile
    forward      attention to the K, V that are here            K, V to the next rank
    backward     gradients of the K, V that are here            K, V to the next rank; then dK, dV after them

After n - 1 hops every query has seen the keys of all n ranks. In backward dK and dV follow their K and V
through all ranks, each of which adds its part. After n hops they are back at their own rank.

A hop computes one block: all queries of this rank against all keys of another. If the keys come first, the
causal mask hides nothing. If both are the same positions, it leaves a triangle. If the keys come later, it
hides the whole block. So the last rank has the most work. Zigzag, at the end of this file, divides it evenly.

A block has its output y and the logarithm lse of its sum of exponentials. `merge` needs no more to add a
block to the blocks so far, and backward computes the weights again from the lse over all blocks. `blocks`
computes one block.

B batch, t this rank's positions, c positions of a block, n ranks.
H heads, K heads of keys and values, D head_dim.
Sums, and the gradients that pass around, are in float32 at least.
Source: Ring Attention (arXiv 2310.01889).
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from compare.contract.communication import ACTIVATION_GRADIENTS, ACTIVATIONS
from compare.spec.experiment import Layout
from torchpar.comm.collectives import DONE, Axis
from torchpar.manual.blocks import attend, attend_backward

Block = tuple[slice, slice, bool]
"""Places of its queries, places of its keys, and whether both are the same positions."""
Blocks = Callable[[int, int], Iterable[Block]]
"""(rank of the queries, rank of the keys) -> the blocks that the causal mask does not hide."""


def plain_blocks(rank: int, source: int) -> Iterator[Block]:
    """The block of a hop, unless all its keys come later."""
    if source <= rank:
        yield slice(None), slice(None), source == rank


class Ring(Function):
    """Attention of this rank's queries to the keys of all ranks, one rank's at a time."""

    @staticmethod
    def forward(ctx: Any, q_BHtD: torch.Tensor, kv_2BKtD: torch.Tensor, axis: Axis, blocks: Blocks):
        y_BHtD = torch.zeros_like(q_BHtD, dtype=torch.promote_types(q_BHtD.dtype, torch.float32))
        lse_BHt = torch.full_like(y_BHtD[..., 0], -torch.inf)
        for source, passing_2BKtD in pass_around(kv_2BKtD, axis):
            for queries, keys, is_diagonal in blocks(axis.rank, source):
                block = attend(q_BHtD[..., queries, :], *passing_2BKtD[..., keys, :], is_diagonal=is_diagonal)
                merge(y_BHtD[..., queries, :], lse_BHt[..., queries], *block)
        y_BHtD = y_BHtD.to(q_BHtD.dtype)
        ctx.save_for_backward(q_BHtD, kv_2BKtD, y_BHtD, lse_BHt)
        ctx.ring = axis, blocks
        return y_BHtD

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor):
        (dy_BHtD,), (axis, blocks) = gradients, ctx.ring
        q_BHtD, kv_2BKtD, y_BHtD, lse_BHt = ctx.saved_tensors
        dq_BHtD, total_2BKtD = (torch.zeros_like(x, dtype=lse_BHt.dtype) for x in (q_BHtD, kv_2BKtD))
        hop = DONE
        for source, passing_2BKtD in pass_around(kv_2BKtD, axis):
            dkv_2BKtD = torch.zeros_like(total_2BKtD)
            for queries, keys, is_diagonal in blocks(axis.rank, source):
                dy_BHcD, q_BHcD, y_BHcD = (x[..., queries, :] for x in (dy_BHtD, q_BHtD, y_BHtD))
                k_BKcD, v_BKcD = passing_2BKtD[..., keys, :]
                dq_BHcD, dk_BKcD, dv_BKcD = attend_backward(
                    dy_BHcD, q_BHcD, k_BKcD, v_BKcD, y_BHcD, lse_BHt[..., queries], is_diagonal=is_diagonal
                )
                dq_BHtD[..., queries, :] += dq_BHcD
                dkv_2BKtD[0][..., keys, :] += dk_BKcD
                dkv_2BKtD[1][..., keys, :] += dv_BKcD
            # The sum of dK, dV of the ranks before arrives: add this rank's part, and pass it on.
            hop.wait()
            leaving_2BKtD, total_2BKtD = dkv_2BKtD.add_(total_2BKtD), torch.empty_like(dkv_2BKtD)
            hop = axis.start_shift(total_2BKtD, leaving_2BKtD, purpose=ACTIVATION_GRADIENTS)
        hop.wait()
        return dq_BHtD.to(q_BHtD.dtype), total_2BKtD.to(kv_2BKtD.dtype), None, None


def pass_around(kv_2BKtD: torch.Tensor, axis: Axis) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the K and V of all ranks, with their rank. This rank's come first."""
    for hop in range(axis.size):
        arriving_2BKtD, work = torch.empty_like(kv_2BKtD), DONE
        if hop < axis.size - 1:
            # Send K and V to the next rank, and receive the previous rank's: this rank computes meanwhile.
            work = axis.start_shift(arriving_2BKtD, kv_2BKtD, purpose=ACTIVATIONS)
        yield (axis.rank - hop) % axis.size, kv_2BKtD
        work.wait()
        kv_2BKtD = arriving_2BKtD


def merge(y: torch.Tensor, lse: torch.Tensor, block_y: torch.Tensor, block_lse: torch.Tensor) -> None:
    """Merge a block into y and lse, in place. Each side counts by its share of the sum of exponentials."""
    share = torch.sigmoid(block_lse - lse)  # 1 / (1 + exp(lse) / exp(block_lse))
    y.lerp_(block_y.to(y.dtype), share.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, block_lse))


# Zigzag ------------------------------------------------------------------------------------------------


def chunks_of(rank: int, layout: Layout) -> tuple[int, ...]:
    """Numbers of a rank's chunks along the sequence: one, or with zigzag one from each end."""
    return (rank, 2 * layout.cp - 1 - rank) if layout.zigzag else (rank,)


def zigzag_blocks(rank: int, source: int, *, layout: Layout, length: int) -> Iterator[Block]:
    """The blocks of a hop: a chunk of queries and a chunk of keys each, unless the keys come later.

    A rank has two chunks of `length` / 2 positions. With its own keys they make three blocks, of which two
    are triangles. With the keys of any other rank they make two: all ranks have the same work at every hop.
    """
    places = slice(0, length // 2), slice(length // 2, length)
    for query, queries in zip(chunks_of(rank, layout), places, strict=True):
        for key, keys in zip(chunks_of(source, layout), places, strict=True):
            if key <= query:
                yield queries, keys, key == query


class RingAttention(nn.Module):
    """The attention core of a ring: q (B, t, H, D), k and v (B, t, K, D), to y (B, t, H, D)."""

    def __init__(self, core: nn.Module, axis: Axis, layout: Layout, mask: object):
        super().__init__()
        self.axis, self.layout = axis, layout

    def forward(self, q_BtHD: torch.Tensor, k_BtKD: torch.Tensor, v_BtKD: torch.Tensor) -> torch.Tensor:
        kv_2BKtD = torch.stack([x.transpose(1, 2) for x in (k_BtKD, v_BtKD)])
        blocks = plain_blocks
        if self.layout.zigzag:
            blocks = partial(zigzag_blocks, layout=self.layout, length=q_BtHD.shape[1])
        return Ring.apply(q_BtHD.transpose(1, 2), kv_2BKtD, self.axis, blocks).transpose(1, 2)
