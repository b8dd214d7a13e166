"""Context parallelism by hand: each rank has some of the positions, and its queries see the keys of all.

    context      what moves forward                   backward
    allgather    K, V gathered                        dK, dV reduce-scattered
    ring         K, V to the next rank, n - 1 times   K, V once more; dK, dV with them, n times: home
    ulysses      q, k, v from positions to heads,     the gradients likewise, the other way
                 and y back

All else in a GPT treats each position by itself. Weights are whole on every rank, and their gradients are
means over cp as over replicas.

A rank's positions are one run of neighbours, or in zigzag two. Of a run of queries and one of keys the causal
mask leaves all if the keys come first, a triangle if they are the same, and else nothing: then nothing is
computed. So in zigzag every rank has as much to do.

B batch, T all positions, t this rank's, R those of a run, H heads, K heads of keys and values, G = H / K,
D head_dim, n ranks.
Sources: Ring Attention (arXiv 2310.01889), Llama 3 (2407.21783, section 3.3.2), Ulysses (2309.14509).
"""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

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

Tensors = tuple[torch.Tensor, ...]


def split_sequence(model: GPT, axis: Axis, layout: Layout, device: torch.device) -> None:
    """Put the layout's attention core into a GPT, from outside, and this rank's positions."""
    take_positions(model, layout, rank=axis.rank, device=device)
    for block in model.blocks:
        core = block.get_submodule("attn.core")
        block.set_submodule("attn.core", CORES[layout.context](core, axis, layout))


def ends_of_runs(length: int, layout: Layout) -> list[list[int]]:
    """The place behind each run of each rank: one, or in zigzag two."""
    runs = order_of_positions(length, layout).reshape(layout.cp, 2 if layout.zigzag else 1, -1)
    return (runs[..., -1] + 1).tolist()


class ContextAttention(nn.Module):
    """In the place of an attention core: q (B, t, H, D), k, v (B, t, K, D), and keys, to y (B, t, H, D)."""

    def __init__(self, core: nn.Module, axis: Axis, layout: Layout):
        super().__init__()
        self.core, self.axis, self.layout = core, axis, layout


class GatheredAttention(ContextAttention):
    """K and V of all positions on every rank; a run of queries sees those up to its end."""

    def forward(self, q_BtHD: torch.Tensor, *k_v_BtKD: torch.Tensor) -> torch.Tensor:
        kv_2BTKD = enter_region(torch.stack(k_v_BtKD[:2]), self.axis, 2)
        length = kv_2BTKD.shape[2]
        order_T = torch.tensor(order_of_positions(length, self.layout), device=q_BtHD.device)
        if self.layout.zigzag:
            kv_2BTKD = kv_2BTKD.index_select(2, order_T.argsort())
        if keys_B2 := k_v_BtKD[2:]:  # dropout takes elements of whole rows of weights
            position_t = order_T.chunk(self.axis.size)[self.axis.rank]
            self.core.seen_TS = position_t[:, None] >= order_T.sort().values
            return self.core(q_BtHD, *kv_2BTKD, *keys_B2)
        q_BHtD, k_BKTD, v_BKTD = (x.transpose(1, 2) for x in (q_BtHD, *kv_2BTKD.unbind()))
        ends, done = ends_of_runs(length, self.layout)[self.axis.rank], []
        for end, run_BHRD in zip(ends, q_BHtD.chunk(len(ends), dim=2), strict=True):
            keys, values = k_BKTD[:, :, :end], v_BKTD[:, :, :end]
            mask_RS = hidden(run_BHRD.shape[2], end, q_BtHD.dtype, q_BtHD.device)
            is_grouped = q_BtHD.shape[2] > kv_2BTKD.shape[3]
            y_BHRD = F.scaled_dot_product_attention(
                run_BHRD, keys, values, attn_mask=mask_RS, enable_gqa=is_grouped
            )
            done.append(y_BHRD)
        return torch.cat(done, dim=2).transpose(1, 2)


@cache  # the same of all layers: autograd keeps it for each
def hidden(queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Causal mask of the last queries: 0, or -inf where a key comes later, (queries, keys)."""
    return torch.full((queries, keys), -torch.inf, dtype=dtype, device=device).triu(keys - queries + 1)


class UlyssesAttention(ContextAttention):
    """All positions of some of the heads, to which the core attends as on one device."""

    def forward(
        self, q_BtHD: torch.Tensor, k_BtKD: torch.Tensor, v_BtKD: torch.Tensor, *keys_B2: torch.Tensor
    ) -> torch.Tensor:
        ranks, q_k_v = self.axis.size, (q_BtHD, k_BtKD, v_BtKD)
        of_ranks = zip(*(x.chunk(ranks, dim=2) for x in q_k_v), strict=True)
        in_order = torch.cat([x for of_rank in of_ranks for x in of_rank], dim=2)
        own_BThD = exchange(in_order, self.axis, split=2, join=1)
        q_k_v = own_BThD.split([x.shape[2] // ranks for x in q_k_v], dim=2)
        return exchange(self.core(*q_k_v, *keys_B2), self.axis, split=1, join=2)


class RingAttention(ContextAttention):
    """K and V pass by, those of one rank at a time; what the queries take from each is merged."""

    def forward(self, q_BtHD: torch.Tensor, k_BtKD: torch.Tensor, v_BtKD: torch.Tensor) -> torch.Tensor:
        q_BKGtD = q_BtHD.unflatten(2, (k_BtKD.shape[2], -1)).permute(0, 2, 3, 1, 4).contiguous()
        kv_2BKtD = torch.stack([x.transpose(1, 2) for x in (k_BtKD, v_BtKD)])
        ends = ends_of_runs(q_BtHD.shape[1] * self.axis.size, self.layout)
        y_BKGtD = _Ring.apply(q_BKGtD, kv_2BKtD, self.axis, ends)
        return y_BKGtD.permute(0, 3, 1, 2, 4).flatten(2, 3)


class _Ring(torch.autograd.Function):
    """Sums are in float32 at least, and so are those that travel."""

    @staticmethod
    def forward(ctx: Any, q_BKGtD, kv_2BKtD, axis, ends):
        cut, done = partial(torch.chunk, chunks=len(ends[0]), dim=-2), dict[int, Tensors]()
        for source, passing_2BKtD in pass_round(kv_2BKtD, axis):
            for i, j, is_triangle in seen(ends[axis.rank], ends[source]):
                block = attend(cut(q_BKGtD)[i], *cut(passing_2BKtD)[j], is_triangle=is_triangle)
                done[i] = merge(*done[i], *block) if i in done else block
        y_BKGtD, lse_BKGt1 = (torch.cat([done[i][k] for i in sorted(done)], dim=-2) for k in (0, 1))
        y_BKGtD = y_BKGtD.to(q_BKGtD.dtype)
        ctx.save_for_backward(q_BKGtD, kv_2BKtD, y_BKGtD, lse_BKGt1)
        ctx.ring = axis, ends
        return y_BKGtD

    @staticmethod
    def backward(ctx: Any, *gradients):
        (dy_BKGtD,), (axis, ends) = gradients, ctx.ring
        q_BKGtD, kv_2BKtD, y_BKGtD, lse_BKGt1 = ctx.saved_tensors
        cut, hop = partial(torch.chunk, chunks=len(ends[0]), dim=-2), DONE
        dot_BKGt1 = (dy_BKGtD.to(lse_BKGt1.dtype) * y_BKGtD).sum(-1, keepdim=True)
        dq_BKGtD, home_2BKtD = (torch.zeros_like(x, dtype=lse_BKGt1.dtype) for x in (q_BKGtD, kv_2BKtD))
        for source, passing_2BKtD in pass_round(kv_2BKtD, axis):
            dkv_2BKtD = torch.zeros_like(home_2BKtD)
            for i, j, is_triangle in seen(ends[axis.rank], ends[source]):
                block = cut(q_BKGtD)[i], *cut(passing_2BKtD)[j]
                of_y = (cut(x)[i] for x in (dy_BKGtD, lse_BKGt1, dot_BKGt1))
                gradients = attend_backward(*block, *of_y, is_triangle=is_triangle)
                for total, part in zip((cut(dq_BKGtD)[i], *cut(dkv_2BKtD)[j]), gradients, strict=True):
                    total += part
            hop.wait()  # with what the ranks before this one have of these gradients
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
    """The pairs of two ranks' runs, by their ends, of which the mask leaves something: a triangle, or all."""
    for i, query in enumerate(of_queries):
        yield from ((i, j, key == query) for j, key in enumerate(of_keys) if key <= query)


def scores(q_BKGRD: torch.Tensor, k_BKRD: torch.Tensor, *, is_triangle: bool) -> torch.Tensor:
    """q k / sqrt(D), -inf where it is hidden: (B, K, G, R, R), in float32 at least."""
    scores_BKGRR = torch.einsum("bkgtd,bksd->bkgts", q_BKGRD, k_BKRD)
    wide, length = torch.promote_types(scores_BKGRR.dtype, torch.float32), scores_BKGRR.shape[-1]
    scores_BKGRR = scores_BKGRR.to(wide) / q_BKGRD.shape[-1] ** 0.5
    return scores_BKGRR.add_(hidden(length, length, wide, q_BKGRD.device)) if is_triangle else scores_BKGRR


def attend(
    q_BKGRD: torch.Tensor, k_BKRD: torch.Tensor, v_BKRD: torch.Tensor, *, is_triangle: bool
) -> Tensors:
    """Attention to a block (B, K, G, R, D), and the logarithm of its sum of exponentials (B, K, G, R, 1)."""
    scores_BKGRR = scores(q_BKGRD, k_BKRD, is_triangle=is_triangle)
    lse_BKGR1 = scores_BKGRR.logsumexp(-1, keepdim=True)
    weights_BKGRR = scores_BKGRR.sub_(lse_BKGR1).exp_().to(v_BKRD.dtype)
    return torch.einsum("bkgts,bksd->bkgtd", weights_BKGRR, v_BKRD).to(lse_BKGR1.dtype), lse_BKGR1


def merge(y: torch.Tensor, lse: torch.Tensor, other_y: torch.Tensor, other_lse: torch.Tensor) -> Tensors:
    """What `attend` gives of two blocks: of both. Each counts by its share of the sum of exponentials."""
    both = torch.logaddexp(lse, other_lse)
    return (lse - both).exp() * y + (other_lse - both).exp() * other_y, both


def attend_backward(q_BKGRD, k_BKRD, v_BKRD, dy_BKGRD, lse_BKGR1, dot_BKGR1, *, is_triangle: bool) -> Tensors:
    """Gradients of q, k and v through one block, from the logsumexp over ALL blocks, and y dy summed over D.

    As y is the sum of w v over all keys, y dy is that of w dw: a softmax's derivative needs no more of other
    blocks.
    """
    weights_BKGRR = scores(q_BKGRD, k_BKRD, is_triangle=is_triangle).sub_(lse_BKGR1).exp_()
    dweights_BKGRR = torch.einsum("bkgtd,bksd->bkgts", dy_BKGRD, v_BKRD).to(weights_BKGRR.dtype)
    dscores_BKGRR = dweights_BKGRR.sub_(dot_BKGR1).mul_(weights_BKGRR).div_(q_BKGRD.shape[-1] ** 0.5)
    dscores_BKGRR = dscores_BKGRR.to(k_BKRD.dtype)
    return (
        torch.einsum("bkgts,bksd->bkgtd", dscores_BKGRR, k_BKRD),
        torch.einsum("bkgts,bkgtd->bksd", dscores_BKGRR, q_BKGRD),
        torch.einsum("bkgts,bkgtd->bksd", weights_BKGRR.to(dy_BKGRD.dtype), dy_BKGRD),
    )


CORES = {"allgather": GatheredAttention, "ring": RingAttention, "ulysses": UlyssesAttention}
