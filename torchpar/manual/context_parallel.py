"""Context parallelism by hand: each rank has some of the positions, and its queries see the keys of all.

    context      what moves forward                   backward
    allgather    K, V gathered                        dK, dV reduce-scattered
    ring         K, V to the next rank, n - 1 times   K, V once more; dK, dV with them, n times: home
    ulysses      q, k, v from positions to heads,     the gradients likewise, the other way
                 and y back

All else in a GPT treats each position by itself. Weights are whole on every rank, and their gradients are
means over cp as over replicas.

A rank's positions are one run of neighbours, or in zigzag two. Of two runs, of queries and of keys, the
causal mask leaves all if the keys come before, a triangle if they are the same, and else nothing: then
nothing is computed. So in zigzag every rank has as much to do.

B batch, T all positions, t this rank's, S those of keys, H heads, K heads of keys and values, G = H / K,
D head_dim, n ranks.
Sources: Ring Attention (arXiv 2310.01889), Llama 3 (2407.21783, section 3.3.2), Ulysses (2309.14509).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from compare.contract.communication import ACTIVATION_GRADIENTS, ACTIVATIONS
from compare.numerics.context import order_of_positions
from compare.spec.experiment import Layout
from torchpar.comm.collectives import DONE, Axis
from torchpar.manual.megatron import enter_region, exchange
from torchpar.model import GPT
from torchpar.positions import take_positions


def split_sequence(model: GPT, axis: Axis, layout: Layout, device: torch.device) -> None:
    """Put the layout's attention core into a GPT, from outside, and this rank's positions."""
    take_positions(model, layout, rank=axis.rank, device=device)
    for block in model.blocks:
        core = block.get_submodule("attn.core")
        block.set_submodule("attn.core", CORES[layout.context](core, axis, layout))


def runs_of(length: int, layout: Layout) -> np.ndarray:
    """The first position of each rank's runs, (n, 1), or in zigzag (n, 2)."""
    runs = order_of_positions(length, layout).reshape(layout.cp, 2 if layout.zigzag else 1, -1)
    return runs[..., 0]


class GatheredAttention(nn.Module):
    """K and V of all positions on every rank; a run of queries sees those up to its end."""

    def __init__(self, core: nn.Module, axis: Axis, layout: Layout):
        super().__init__()
        self.core, self.axis, self.layout = core, axis, layout

    def forward(
        self, q_BtHD: torch.Tensor, k_BtKD: torch.Tensor, v_BtKD: torch.Tensor, *keys_B2: torch.Tensor
    ) -> torch.Tensor:
        kv_2BTKD = enter_region(torch.stack([k_BtKD, v_BtKD]), self.axis, 2)
        order_T = torch.tensor(order_of_positions(kv_2BTKD.shape[2], self.layout), device=q_BtHD.device)
        if self.layout.zigzag:
            kv_2BTKD = kv_2BTKD.index_select(2, order_T.argsort())
        if keys_B2:  # dropout takes its share of whole rows of weights
            self.core.seen_TS = (
                order_T.chunk(self.axis.size)[self.axis.rank][:, None] >= order_T.sort().values
            )
            return self.core(q_BtHD, *kv_2BTKD, *keys_B2)
        q_BHtD, k_BKTD, v_BKTD = (x.transpose(1, 2) for x in (q_BtHD, *kv_2BTKD.unbind()))
        starts = runs_of(k_BKTD.shape[2], self.layout)[self.axis.rank].tolist()
        done = []
        for start, run_BHRD in zip(starts, q_BHtD.chunk(len(starts), dim=2), strict=True):
            end = start + run_BHRD.shape[2]
            seen_RS = torch.ones(end - start, end, dtype=torch.bool, device=q_BHtD.device).tril(start)
            keys, values = k_BKTD[:, :, :end], v_BKTD[:, :, :end]
            y_BHRD = F.scaled_dot_product_attention(
                run_BHRD, keys, values, attn_mask=seen_RS, enable_gqa=k_BtKD.shape[2] < q_BtHD.shape[2]
            )
            done.append(y_BHRD)
        return torch.cat(done, dim=2).transpose(1, 2)


class RingAttention(nn.Module):
    """K and V pass by, those of one rank at a time; what the queries take from each is merged."""

    def __init__(self, core: nn.Module, axis: Axis, layout: Layout):
        super().__init__()
        self.axis, self.layout = axis, layout

    def forward(self, q_BtHD: torch.Tensor, k_BtKD: torch.Tensor, v_BtKD: torch.Tensor) -> torch.Tensor:
        q_BKGtD = q_BtHD.unflatten(2, (k_BtKD.shape[2], -1)).permute(0, 2, 3, 1, 4).contiguous()
        kv_2BKtD = torch.stack([x.transpose(1, 2) for x in (k_BtKD, v_BtKD)])
        runs = runs_of(q_BtHD.shape[1] * self.axis.size, self.layout).tolist()
        y_BKGtD = _Ring.apply(q_BKGtD, kv_2BKtD, self.axis, runs)
        return y_BKGtD.permute(0, 3, 1, 2, 4).flatten(2, 3)


class _Ring(torch.autograd.Function):
    """Sums are in float32 at least, and what travels of them is. R is t, or in zigzag half of it."""

    @staticmethod
    def forward(ctx: Any, q_BKGtD, kv_2BKtD, axis, runs):
        parts = len(runs[0])
        queries, done = q_BKGtD.chunk(parts, dim=-2), dict[int, tuple[torch.Tensor, torch.Tensor]]()
        for source, passing_2BKtD in pass_round(kv_2BKtD, axis):
            keys_values = passing_2BKtD.chunk(parts, dim=-2)
            for i, j, is_triangle in seen(runs[axis.rank], runs[source]):
                block = attend(queries[i], *keys_values[j], is_triangle=is_triangle)
                done[i] = merge(*done[i], *block) if i in done else block
        y_BKGtD = torch.cat([done[i][0] for i in range(parts)], dim=-2).to(q_BKGtD.dtype)
        lse_BKGt = torch.cat([done[i][1] for i in range(parts)], dim=-1)
        ctx.save_for_backward(q_BKGtD, kv_2BKtD, y_BKGtD, lse_BKGt)
        ctx.ring = axis, runs
        return y_BKGtD

    @staticmethod
    def backward(ctx: Any, *gradients):
        (dy_BKGtD,), (q_BKGtD, kv_2BKtD, y_BKGtD, lse_BKGt) = gradients, ctx.saved_tensors
        (axis, runs), wide = ctx.ring, lse_BKGt.dtype
        parts = len(runs[0])
        dot_BKGt = (dy_BKGtD.to(wide) * y_BKGtD).sum(-1)
        dq_BKGtD, home_2BKtD = (torch.zeros_like(x, dtype=wide) for x in (q_BKGtD, kv_2BKtD))
        queries, of_y, of_q = (x.chunk(parts, dim=-2) for x in (q_BKGtD, dy_BKGtD, dq_BKGtD))
        lse, dot, hop = lse_BKGt.chunk(parts, dim=-1), dot_BKGt.chunk(parts, dim=-1), DONE
        for source, passing_2BKtD in pass_round(kv_2BKtD, axis):
            dkv_2BKtD = torch.zeros_like(home_2BKtD)
            keys_values, of_kv = (x.chunk(parts, dim=-2) for x in (passing_2BKtD, dkv_2BKtD))
            for i, j, is_triangle in seen(runs[axis.rank], runs[source]):
                of_block = attend_backward(
                    queries[i], *keys_values[j], of_y[i], lse[i], dot[i], is_triangle=is_triangle
                )
                for total, part in zip((of_q[i], *of_kv[j]), of_block, strict=True):
                    total += part
            hop.wait()  # what the ranks before this one have of these gradients
            leaving_2BKtD, home_2BKtD = dkv_2BKtD.add_(home_2BKtD), torch.empty_like(dkv_2BKtD)
            hop = axis.start_shift(home_2BKtD, leaving_2BKtD, purpose=ACTIVATION_GRADIENTS)
        hop.wait()
        return dq_BKGtD.to(q_BKGtD.dtype), home_2BKtD.to(kv_2BKtD.dtype), None, None


def pass_round(kv_2BKtD: torch.Tensor, axis: Axis) -> Iterator[tuple[int, torch.Tensor]]:
    """K and V of all ranks, each with its rank, this one's first: the next arrive while these are in use."""
    for hop in range(axis.size):
        arriving_2BKtD, work = torch.empty_like(kv_2BKtD), DONE
        if hop < axis.size - 1:
            work = axis.start_shift(arriving_2BKtD, kv_2BKtD, purpose=ACTIVATIONS)
        yield (axis.rank - hop) % axis.size, kv_2BKtD
        work.wait()
        kv_2BKtD = arriving_2BKtD


def seen(of_queries: Sequence[int], of_keys: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
    """The pairs of two ranks' runs, by their first positions, of which the mask leaves something: a triangle
    (True), or all."""
    for i, query in enumerate(of_queries):
        for j, key in enumerate(of_keys):
            if key <= query:
                yield i, j, key == query


def scores(q_BKGRD: torch.Tensor, k_BKRD: torch.Tensor, *, is_triangle: bool) -> torch.Tensor:
    """q k / sqrt(D), -inf where it is hidden: (B, K, G, R, R), in float32 at least."""
    scores_BKGRR = torch.einsum("bkgtd,bksd->bkgts", q_BKGRD, k_BKRD)
    scores_BKGRR = (
        scores_BKGRR.to(torch.promote_types(q_BKGRD.dtype, torch.float32)) / q_BKGRD.shape[-1] ** 0.5
    )
    if is_triangle:
        hidden_RR = torch.ones(scores_BKGRR.shape[-2:], dtype=torch.bool, device=q_BKGRD.device).triu(1)
        scores_BKGRR = scores_BKGRR.masked_fill(hidden_RR, -torch.inf)
    return scores_BKGRR


def attend(
    q_BKGRD: torch.Tensor, k_BKRD: torch.Tensor, v_BKRD: torch.Tensor, *, is_triangle: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to one block (B, K, G, R, D), and the logarithm of its sum of exponentials (B, K, G, R)."""
    scores_BKGRR = scores(q_BKGRD, k_BKRD, is_triangle=is_triangle)
    lse_BKGR = scores_BKGRR.logsumexp(-1)
    weights_BKGRR = (scores_BKGRR - lse_BKGR[..., None]).exp().to(v_BKRD.dtype)
    return torch.einsum("bkgts,bksd->bkgtd", weights_BKGRR, v_BKRD).to(lse_BKGR.dtype), lse_BKGR


def merge(
    y_BKGRD: torch.Tensor, lse_BKGR: torch.Tensor, other_BKGRD: torch.Tensor, other_lse_BKGR: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to both of two blocks: each counts by its share of the sum of exponentials."""
    both_BKGR = torch.logaddexp(lse_BKGR, other_lse_BKGR)
    mine, theirs = ((lse - both_BKGR).exp()[..., None] for lse in (lse_BKGR, other_lse_BKGR))
    return mine * y_BKGRD + theirs * other_BKGRD, both_BKGR


def attend_backward(
    q_BKGRD: torch.Tensor,
    k_BKRD: torch.Tensor,
    v_BKRD: torch.Tensor,
    dy_BKGRD: torch.Tensor,
    lse_BKGR: torch.Tensor,
    dot_BKGR: torch.Tensor,
    *,
    is_triangle: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v through one block, from the logsumexp over ALL blocks, and y dy summed over D.

    As y is the sum over all keys of w v, so is y dy that of w (dw): the derivative of a softmax needs no more
    than this of the other blocks.
    """
    weights_BKGRR = (scores(q_BKGRD, k_BKRD, is_triangle=is_triangle) - lse_BKGR[..., None]).exp()
    dweights_BKGRR = torch.einsum("bkgtd,bksd->bkgts", dy_BKGRD, v_BKRD)
    dscores_BKGRR = weights_BKGRR * (dweights_BKGRR - dot_BKGR[..., None]) / q_BKGRD.shape[-1] ** 0.5
    dscores_BKGRR, weights_BKGRR = dscores_BKGRR.to(q_BKGRD.dtype), weights_BKGRR.to(dy_BKGRD.dtype)
    return (
        torch.einsum("bkgts,bksd->bkgtd", dscores_BKGRR, k_BKRD),
        torch.einsum("bkgts,bkgtd->bksd", dscores_BKGRR, q_BKGRD),
        torch.einsum("bkgts,bkgtd->bksd", weights_BKGRR, dy_BKGRD),
    )


class UlyssesAttention(nn.Module):
    """All positions of some of the heads, to which the core attends as on one device."""

    def __init__(self, core: nn.Module, axis: Axis, layout: Layout):
        super().__init__()
        self.core, self.axis = core, axis

    def forward(
        self, q_BtHD: torch.Tensor, k_BtKD: torch.Tensor, v_BtKD: torch.Tensor, *keys_B2: torch.Tensor
    ) -> torch.Tensor:
        ranks, q_k_v = self.axis.size, (q_BtHD, k_BtKD, v_BtKD)
        of_ranks = zip(*(x.chunk(ranks, dim=2) for x in q_k_v), strict=True)
        in_order = torch.cat([x for of_rank in of_ranks for x in of_rank], dim=2)
        own_BThD = exchange(in_order, self.axis, split=2, join=1)
        q_k_v = own_BThD.split([x.shape[2] // ranks for x in q_k_v], dim=2)
        return exchange(self.core(*q_k_v, *keys_B2), self.axis, split=1, join=2)


CORES = {"allgather": GatheredAttention, "ring": RingAttention, "ulysses": UlyssesAttention}
