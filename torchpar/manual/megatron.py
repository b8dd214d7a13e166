"""Megatron's parts: collectives with a derivative, parameters in parts, and a vocabulary that is split.

                                    forward            backward
    enter_region            f       as it is           all-reduce
    leave_region            g       all-reduce         as it is
    under sequence parallelism, `dim` of the positions:
    enter_region            f       all-gather         reduce-scatter
    leave_region            g       reduce-scatter     all-gather
    scatter                         this rank's part   all-gather
    exchange                        all-to-all         all-to-all

A plain all-reduce inside a module would be differentiated as if it were no collective at all: gradients
would be wrong without an error.

N tokens, V this rank's part of the vocabulary, R ranks of the axis.
Sources: Megatron-LM (arXiv 1909.08053), its sequence parallelism (arXiv 2205.05198).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from compare.contract.communication import ACTIVATION_GRADIENTS, ACTIVATIONS, LOSS, RECORD
from torchpar.comm.collectives import Axis

SEQUENCE_DIM = 1  # of activations (B, T, C)


def enter_region(x: torch.Tensor, axis: Axis, dim: int | None = None) -> torch.Tensor:
    """f: x, shared by all ranks, or its parts along `dim` joined, for computations that differ by rank."""
    if dim is None:
        return _Mapping.apply(x, axis, dim, _same, _all_reduce)
    return _Mapping.apply(x, axis, dim, _all_gather, _reduce_scatter)


def leave_region(x: torch.Tensor, axis: Axis, dim: int | None = None) -> torch.Tensor:
    """g: the sum of the ranks' x, shared by all ranks; with `dim` this rank's part of it, (.., d / R, ..)."""
    if dim is None:
        return _Mapping.apply(x, axis, dim, _all_reduce, _same)
    return _Mapping.apply(x, axis, dim, _reduce_scatter, _all_gather)


def scatter(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    return _Mapping.apply(x, axis, dim, _part, _all_gather)


def exchange(x: torch.Tensor, axis: Axis, *, split: int, join: int) -> torch.Tensor:
    """All of dim `split` and this rank's part of dim `join` become its part of `split`, and all of `join`."""
    return _Mapping.apply(x, axis, (split, join), _exchange, _exchange_back)


class _Mapping(torch.autograd.Function):
    """One movement of data forward, and its transpose backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: Any, forward: Any, backward: Any):
        ctx.transpose, ctx.along = backward, (axis, dim)
        return forward(x, axis, dim, ACTIVATIONS)

    @staticmethod
    def backward(ctx: Any, *gradients):
        return ctx.transpose(gradients[0], *ctx.along, ACTIVATION_GRADIENTS), None, None, None, None


def _same(x: torch.Tensor, axis: Axis, dim: None, purpose: str) -> torch.Tensor:
    return x.view_as(x)


def _all_reduce(x: torch.Tensor, axis: Axis, dim: None, purpose: str) -> torch.Tensor:
    # A copy: x may be kept for a backward, as selective recomputation keeps products.
    total = x.clone(memory_format=torch.contiguous_format)
    axis.all_reduce(total, purpose=purpose)
    return total


def _part(x: torch.Tensor, axis: Axis, dim: int, purpose: str) -> torch.Tensor:
    return x.chunk(axis.size, dim=dim)[axis.rank].contiguous()


def _all_gather(x: torch.Tensor, axis: Axis, dim: int, purpose: str) -> torch.Tensor:
    return torch.cat(gather_parts(x, axis, purpose), dim=dim)


def _reduce_scatter(x: torch.Tensor, axis: Axis, dim: int, purpose: str) -> torch.Tensor:
    stacked = torch.stack(x.chunk(axis.size, dim=dim))
    mine = torch.empty_like(stacked[0])
    axis.reduce_scatter(mine.view(-1), stacked.view(-1), purpose=purpose)
    return mine


def _exchange(x: torch.Tensor, axis: Axis, dims: tuple[int, int], purpose: str) -> torch.Tensor:
    split, join = dims
    sent = torch.stack(x.chunk(axis.size, dim=split))
    received = torch.empty_like(sent)
    axis.all_to_all(received, sent, purpose=purpose)
    return torch.cat(received.unbind(), dim=join)


def _exchange_back(x: torch.Tensor, axis: Axis, dims: tuple[int, int], purpose: str) -> torch.Tensor:
    return _exchange(x, axis, dims[::-1], purpose)


def gather_parts(x: torch.Tensor, axis: Axis, purpose: str) -> list[torch.Tensor]:
    """Every rank's x, of one shape, in the order of ranks."""
    full = x.new_empty((axis.size, *x.shape))
    axis.all_gather(full.view(-1), x.contiguous().view(-1), purpose=purpose)
    return list(full.unbind())


@dataclass(frozen=True)
class Split:
    """The cut of a parameter over an axis: zeros fill up what the ranks do not divide, as a vocabulary.

    Attributes:
        dim: along which.
        size: of the whole along `dim`.
        groups: `dim` holds this many equal parts (q, k and v), and each of them is cut for itself: a cut
            through the middle would give one rank all of q and another all of v.
    """

    dim: int
    size: int
    groups: int = 1

    def parameter(self, full: torch.Tensor, axis: Axis) -> nn.Parameter:
        """A copy of this rank's part, (.., d / R, ..) at `dim`, of a parameter (.., d, ..)."""
        group = self.size // self.groups
        share = -(-group // axis.size)
        grouped = full.detach().unflatten(self.dim, (self.groups, group))
        part = grouped.new_zeros((*full.shape[: self.dim], self.groups, share, *full.shape[self.dim + 1 :]))
        start, stop = min(axis.rank * share, group), min((axis.rank + 1) * share, group)
        part.narrow(self.dim + 1, 0, stop - start).copy_(grouped.narrow(self.dim + 1, start, stop - start))
        return nn.Parameter(part.flatten(self.dim, self.dim + 1), requires_grad=full.requires_grad)

    def gather(self, part: torch.Tensor, axis: Axis) -> torch.Tensor:
        """The whole, (.., d, ..), from every rank's part: all ranks call it at once."""
        parts = (p.unflatten(self.dim, (self.groups, -1)) for p in gather_parts(part, axis, RECORD))
        joined = torch.cat(list(parts), dim=self.dim + 1)
        return joined.narrow(self.dim + 1, 0, self.size // self.groups).flatten(self.dim, self.dim + 1)


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are split, padded with zeros: every rank looks up the ids that it has."""

    parts = ("weight",)

    def __init__(self, embedding: nn.Embedding, axis: Axis, *, sequence_dim: int | None):
        super().__init__()
        self.axis, self.sequence_dim = axis, sequence_dim
        self.split = Split(dim=0, size=embedding.num_embeddings)
        self.weight = self.split.parameter(embedding.weight, axis)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (B, T) -> (B, T, C), the same on all ranks; with `sequence_dim` this rank's part along it."""
        local = ids - self.axis.rank * len(self.weight)
        elsewhere = (local < 0) | (local >= len(self.weight))
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        x = x.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return leave_region(x, self.axis, self.sequence_dim)


class VocabParallelCrossEntropy(nn.Module):
    """Mean cross-entropy of logits that are split over the vocabulary, which padding fills up."""

    def __init__(self, axis: Axis, *, vocab_size: int):
        super().__init__()
        self.axis, self.vocab_size = axis, vocab_size

    def forward(self, logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        """This rank's columns (N, V), and ids over the whole vocabulary -> the mean in nats, a scalar."""
        return _CrossEntropy.apply(logits_NV, targets_N, self.axis, self.vocab_size).mean()


class _CrossEntropy(torch.autograd.Function):
    """Each rank's maximum, sum of exponentials and target logit go round once; no logit does."""

    @staticmethod
    def forward(ctx: Any, logits_NV, targets_N, axis, vocab_size):
        start = axis.rank * logits_NV.shape[1]
        real = min(max(vocab_size - start, 0), logits_NV.shape[1])  # columns that are no padding
        x_NV = logits_NV[:, :real].to(torch.promote_types(logits_NV.dtype, torch.float32))
        max_N = x_NV.amax(-1) if real else x_NV.new_full(x_NV.shape[:1], -torch.inf)
        exp_NV = (x_NV - max_N.unsqueeze(-1)).exp()
        elsewhere_N = (targets_N < start) | (targets_N >= start + real)
        column_N1 = (targets_N - start).masked_fill(elsewhere_N, 0).unsqueeze(-1)
        target_N = x_NV.gather(1, column_N1).squeeze(-1) if real else x_NV.new_zeros(x_NV.shape[:1])
        mine_3N = torch.stack([max_N, exp_NV.sum(-1), target_N.masked_fill(elsewhere_N, 0.0)])
        max_RN, sum_RN, target_RN = torch.stack(gather_parts(mine_3N, axis, LOSS), dim=1)
        global_max_N = max_RN.amax(0)
        global_sum_N = (sum_RN * (max_RN - global_max_N).exp()).sum(0)
        probability_NV = exp_NV.mul_(((max_N - global_max_N).exp() / global_sum_N).unsqueeze(-1))
        ctx.save_for_backward(probability_NV, column_N1, elsewhere_N)
        ctx.like = (logits_NV.shape, logits_NV.dtype)
        return global_sum_N.log() + global_max_N - target_RN.sum(0)

    @staticmethod
    def backward(ctx: Any, *gradients):
        probability_NV, column_N1, elsewhere_N = ctx.saved_tensors
        shape, dtype = ctx.like
        real_NV = probability_NV * gradients[0].unsqueeze(-1)
        if real_NV.shape[1]:
            real_NV.scatter_add_(1, column_N1, -gradients[0].masked_fill(elsewhere_N, 0.0).unsqueeze(-1))
        padding = shape[1] - real_NV.shape[1]
        return (F.pad(real_NV, (0, padding)) if padding else real_NV).to(dtype), None, None, None
