"""Ring attention by hand: K and V pass from rank to rank, and no rank gathers them.

    hop          compute                                        meanwhile
    forward      attention to the K, V that are here            K, V to the next rank
    backward     gradients of the K, V that are here            K, V to the next rank; then dK, dV after them

After n - 1 hops every query has seen the keys of all n ranks. In backward dK and dV follow their K and V
through all ranks, each of which adds its part. After n hops they are back at their own rank.

A hop computes one block: all queries of this rank against all keys of another. If the keys come first, the
causal mask hides nothing. If both are the same positions, it leaves a triangle. If the keys come later, it
hides the whole block. So the last rank has the most work. Zigzag, at the end of this file, divides it evenly.

Softmax over blocks: each block has its output y and the logarithm lse of its sum of exponentials. Two blocks
are merged by their shares of the total. Autograd would save the weights of every block. So backward is
written by hand: it computes a block's weights again, from its scores and the lse over all blocks.

B batch, t this rank's positions, c positions of a block, n ranks.
K heads of keys and values, G query heads of each, D head_dim.
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
    def forward(ctx: Any, q_BKGtD: torch.Tensor, kv_2BKtD: torch.Tensor, axis: Axis, blocks: Blocks):
        y_BKGtD = torch.zeros_like(q_BKGtD, dtype=torch.promote_types(q_BKGtD.dtype, torch.float32))
        lse_BKGt1 = torch.full_like(y_BKGtD[..., :1], -torch.inf)
        for source, passing_2BKtD in pass_around(kv_2BKtD, axis):
            for queries, keys, is_diagonal in blocks(axis.rank, source):
                q_BKGcD, (k_BKcD, v_BKcD) = q_BKGtD[..., queries, :], passing_2BKtD[..., keys, :]
                block = attend(q_BKGcD, k_BKcD, v_BKcD, is_diagonal=is_diagonal)
                merge(y_BKGtD[..., queries, :], lse_BKGt1[..., queries, :], *block)
        y_BKGtD = y_BKGtD.to(q_BKGtD.dtype)
        ctx.save_for_backward(q_BKGtD, kv_2BKtD, y_BKGtD, lse_BKGt1)
        ctx.ring = axis, blocks
        return y_BKGtD

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor):
        (dy_BKGtD,), (axis, blocks) = gradients, ctx.ring
        q_BKGtD, kv_2BKtD, y_BKGtD, lse_BKGt1 = ctx.saved_tensors
        dot_BKGt1 = (dy_BKGtD.to(lse_BKGt1.dtype) * y_BKGtD).sum(-1, keepdim=True)
        dq_BKGtD, total_2BKtD = (torch.zeros_like(x, dtype=lse_BKGt1.dtype) for x in (q_BKGtD, kv_2BKtD))
        hop = DONE
        for source, passing_2BKtD in pass_around(kv_2BKtD, axis):
            dkv_2BKtD = torch.zeros_like(total_2BKtD)
            for queries, keys, is_diagonal in blocks(axis.rank, source):
                here = (x[..., queries, :] for x in (q_BKGtD, dy_BKGtD, lse_BKGt1, dot_BKGt1))
                dq_BKGcD, dk_BKcD, dv_BKcD = attend_backward(
                    *passing_2BKtD[..., keys, :], *here, is_diagonal=is_diagonal
                )
                dq_BKGtD[..., queries, :] += dq_BKGcD
                dkv_2BKtD[0][..., keys, :] += dk_BKcD
                dkv_2BKtD[1][..., keys, :] += dv_BKcD
            # The sum of dK, dV of the ranks before arrives: add this rank's part, and pass it on.
            hop.wait()
            leaving_2BKtD, total_2BKtD = dkv_2BKtD.add_(total_2BKtD), torch.empty_like(dkv_2BKtD)
            hop = axis.start_shift(total_2BKtD, leaving_2BKtD, purpose=ACTIVATION_GRADIENTS)
        hop.wait()
        return dq_BKGtD.to(q_BKGtD.dtype), total_2BKtD.to(kv_2BKtD.dtype), None, None


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


def scores(q_BKGcD: torch.Tensor, k_BKcD: torch.Tensor, *, is_diagonal: bool) -> torch.Tensor:
    """q k / sqrt(D), and -inf for later keys: (B, K, G, c, c), in float32 at least."""
    scores_BKGcc = torch.einsum("bkgtd,bksd->bkgts", q_BKGcD, k_BKcD)
    scores_BKGcc = scores_BKGcc.to(torch.promote_types(scores_BKGcc.dtype, torch.float32))
    scores_BKGcc = scores_BKGcc / q_BKGcD.shape[-1] ** 0.5
    if is_diagonal:
        later_cc = torch.ones(scores_BKGcc.shape[-2:], dtype=torch.bool, device=q_BKGcD.device).triu(1)
        scores_BKGcc.masked_fill_(later_cc, -torch.inf)
    return scores_BKGcc


def attend(
    q_BKGcD: torch.Tensor, k_BKcD: torch.Tensor, v_BKcD: torch.Tensor, *, is_diagonal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to a block, y (B, K, G, c, D), and its lse (B, K, G, c, 1)."""
    scores_BKGcc = scores(q_BKGcD, k_BKcD, is_diagonal=is_diagonal)
    lse_BKGc1 = scores_BKGcc.logsumexp(-1, keepdim=True)
    weights_BKGcc = scores_BKGcc.sub_(lse_BKGc1).exp_().to(v_BKcD.dtype)
    return torch.einsum("bkgts,bksd->bkgtd", weights_BKGcc, v_BKcD).to(lse_BKGc1.dtype), lse_BKGc1


def merge(y: torch.Tensor, lse: torch.Tensor, block_y: torch.Tensor, block_lse: torch.Tensor) -> None:
    """Merge a block into y and lse, in place. Each side counts by its share of the sum of exponentials."""
    both = torch.logaddexp(lse, block_lse)
    y.mul_((lse - both).exp_()).add_((block_lse - both).exp_() * block_y)
    lse.copy_(both)


def attend_backward(
    k_BKcD: torch.Tensor,
    v_BKcD: torch.Tensor,
    q_BKGcD: torch.Tensor,
    dy_BKGcD: torch.Tensor,
    lse_BKGc1: torch.Tensor,
    dot_BKGc1: torch.Tensor,
    *,
    is_diagonal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v through one block.

    lse is over all blocks. dot is the sum over D of y dy. Since y is the sum of w v over all keys, dot is the
    sum of w dw, the only number that the derivative of softmax needs of other blocks.
    """
    weights_BKGcc = scores(q_BKGcD, k_BKcD, is_diagonal=is_diagonal).sub_(lse_BKGc1).exp_()
    dweights_BKGcc = torch.einsum("bkgtd,bksd->bkgts", dy_BKGcD, v_BKcD).to(weights_BKGcc.dtype)
    dscores_BKGcc = dweights_BKGcc.sub_(dot_BKGc1).mul_(weights_BKGcc).div_(q_BKGcD.shape[-1] ** 0.5)
    dscores_BKGcc = dscores_BKGcc.to(k_BKcD.dtype)
    return (
        torch.einsum("bkgts,bksd->bkgtd", dscores_BKGcc, k_BKcD),
        torch.einsum("bkgts,bkgtd->bksd", dscores_BKGcc, q_BKGcD),
        torch.einsum("bkgts,bkgtd->bksd", weights_BKGcc.to(dy_BKGcD.dtype), dy_BKGcD),
    )


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

    def __init__(self, core: nn.Module, axis: Axis, layout: Layout):
        super().__init__()
        self.axis, self.layout = axis, layout

    def forward(self, q_BtHD: torch.Tensor, k_BtKD: torch.Tensor, v_BtKD: torch.Tensor) -> torch.Tensor:
        q_BKGtD = q_BtHD.unflatten(2, (k_BtKD.shape[2], -1)).permute(0, 2, 3, 1, 4).contiguous()
        kv_2BKtD = torch.stack([x.transpose(1, 2) for x in (k_BtKD, v_BtKD)])
        blocks = plain_blocks
        if self.layout.zigzag:
            blocks = partial(zigzag_blocks, layout=self.layout, length=q_BtHD.shape[1])
        y_BKGtD = Ring.apply(q_BKGtD, kv_2BKtD, self.axis, blocks)
        return y_BKGtD.permute(0, 3, 1, 2, 4).flatten(2, 3)
