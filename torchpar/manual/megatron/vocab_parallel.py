"""Vocabulary-parallel embedding and cross-entropy, for any module: no rank ever has all logits.

N tokens, V this rank's part of the vocabulary, R ranks of the axis, M tokens whose target is this rank's.
Source: Megatron-LM (arXiv 1909.08053), section 3.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from compare.contract.communication import LOSS
from torchpar.comm.collectives import Axis
from torchpar.comm.untraced import untraced
from torchpar.manual.megatron.mappings import gather_parts, reduce_from_region, reduce_scatter_from_region
from torchpar.manual.megatron.split import Split, SplitLayer, require_plain, take_parameter

ODD = ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")  # options that a split embedding lacks


class VocabParallelEmbedding(SplitLayer):
    """An embedding whose rows are split, padded with zeros: every rank looks up the ids that it has.

    Make it with `from_embedding`. An id outside of the vocabulary is an IndexError, as of nn.Embedding.

        >>> axis = Axis.of(None)
        >>> split = VocabParallelEmbedding.from_embedding(nn.Embedding(10, 8), axis)
        >>> split(torch.arange(4)).shape                # whole, and the same on all ranks
        torch.Size([4, 8])
        >>> len(split.weight) == -(-10 // axis.size)    # what 10 does not fill is padding
        True

    Attributes:
        weight: this rank's rows.
        split: of the weight, along dim 0.
    """

    def __init__(self, embedding: nn.Embedding, axis: Axis, *, sequence_dim: int | None):
        super().__init__()
        require_plain(type(self), nn.Embedding, embedding)
        odd = {name: getattr(embedding, name) for name in ODD}
        set_ones = [name for name, value in odd.items() if value is not None and value is not False]
        if set_ones:
            raise ValueError(f"an embedding with {', '.join(set_ones)} cannot be split: leave it whole")
        self.axis, self.sequence_dim = axis, sequence_dim
        self.split = Split(dim=0, size=embedding.num_embeddings, padded=True)
        self.weight = take_parameter(embedding.weight, self.split, axis)

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, axis: Axis, *, sequence_dim: int | None = None
    ) -> "VocabParallelEmbedding":
        """Split an embedding that is the same on all ranks; with `sequence_dim` its output is split too.

        Raises:
            TypeError: this is no plain nn.Embedding: see `require_plain`.
            ValueError: it has padding_idx, max_norm, scale_grad_by_freq or sparse.
        """
        return cls(embedding, axis, sequence_dim=sequence_dim)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (...), integers -> (..., C); with `sequence_dim` this rank's part along it."""
        require_inside(ids, self.split.size, what="id")
        local = ids - self.axis.rank * len(self.weight)
        elsewhere = (local < 0) | (local >= len(self.weight))
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        x = x.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.sequence_dim is None:
            return reduce_from_region(x, self.axis)
        return reduce_scatter_from_region(x, self.axis, dim=self.sequence_dim)


class VocabParallelCrossEntropy(nn.Module):
    """`vocab_parallel_cross_entropy` as a module, in the place of nn.CrossEntropyLoss.

    Args:
        axis: the ranks.
        vocab_size: the true one; what the ranks hold beyond it is padding.
    """

    def __init__(self, axis: Axis, *, vocab_size: int):
        super().__init__()
        self.axis, self.vocab_size = axis, vocab_size

    def forward(self, logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_cross_entropy(logits_NV, targets_N, self.axis, vocab_size=self.vocab_size)


@untraced
def vocab_parallel_cross_entropy(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    axis: Axis,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """F.cross_entropy of logits that are split over the vocabulary, and are never gathered.

        >>> axis = Axis.of(None)
        >>> head = ColumnParallelLinear.from_linear(nn.Linear(8, 10), axis, padded=True)
        >>> x, targets = torch.ones(4, 8), torch.arange(4)
        >>> loss = vocab_parallel_cross_entropy(head(x), targets, axis, vocab_size=10)
        >>> loss.backward()

    Args:
        logits_NV: this rank's columns (N, V); all ranks hold equally many, in order.
        targets_N: ids over the whole vocabulary, the same on all ranks.
        axis: the ranks.
        vocab_size: the true one: columns beyond it are padding and take no part. None: all columns are.
        ignore_index: a target that does not count.
        reduction: mean (over the targets that count), sum, or none.

    Returns:
        The loss in nats, a scalar or (N,), the same on all ranks; float32 or float64. It can be
        differentiated once.

    Raises:
        IndexError: a target is outside of the vocabulary. On a GPU its kernel fails, as PyTorch's own does.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction = {reduction!r}: use mean, sum or none")
    size = logits_NV.shape[1] * axis.size if vocab_size is None else vocab_size
    require_inside(targets_N, size, ignore_index=ignore_index)
    loss_N = _CrossEntropy.apply(logits_NV, targets_N, axis, size, ignore_index)
    if reduction == "none":
        return loss_N
    return loss_N.sum() if reduction == "sum" else loss_N.sum() / (targets_N != ignore_index).sum()


@untraced
def require_inside(
    tokens: torch.Tensor, size: int, *, ignore_index: int | None = None, what: str = "target"
) -> None:
    """IndexError if one of the tokens, any shape, is outside [0, size); on a GPU the kernel asserts it."""
    outside = (tokens < 0) | (tokens >= size)
    if ignore_index is not None:
        outside &= tokens != ignore_index
    if tokens.device.type == "cuda":
        torch._assert_async(~outside.any(), f"{what} outside of the vocabulary of {size}")
    elif outside.any():
        raise IndexError(f"{what} {tokens[outside][0]} is outside of the vocabulary of {size}")


class _CrossEntropy(torch.autograd.Function):
    """Each rank's maximum, sum of exponentials and target logit go round once; no logit does."""

    @staticmethod
    def forward(ctx: Any, logits_NV, targets_N, axis, vocab_size, ignore_index):
        start = axis.rank * logits_NV.shape[1]
        real = min(max(vocab_size - start, 0), logits_NV.shape[1])  # columns that are no padding
        x_NV = logits_NV[:, :real].to(torch.promote_types(logits_NV.dtype, torch.float32))
        max_N = x_NV.amax(-1) if real else x_NV.new_full(x_NV.shape[:1], -torch.inf)
        finite_N = max_N.clamp(min=torch.finfo(x_NV.dtype).min)  # if all are masked
        exp_NV = (x_NV - finite_N.unsqueeze(-1)).exp()
        elsewhere_N = (targets_N < start) | (targets_N >= start + real)
        column_N1 = (targets_N - start).masked_fill(elsewhere_N, 0).unsqueeze(-1)
        target_N = x_NV.gather(1, column_N1).squeeze(-1) if real else x_NV.new_zeros(x_NV.shape[:1])
        target_N = target_N.masked_fill(elsewhere_N, 0.0)
        mine_3N = torch.stack([max_N, exp_NV.sum(-1), target_N])
        max_RN, sum_RN, target_RN = torch.stack(gather_parts(mine_3N, axis, LOSS), dim=1)
        whole_max_N = max_RN.amax(0)
        whole_sum_N = (sum_RN * (max_RN - whole_max_N).exp()).sum(0)
        probability_NV = exp_NV.mul_(((max_N - whole_max_N).exp() / whole_sum_N).unsqueeze(-1))
        ignored_N = targets_N == ignore_index
        ctx.save_for_backward(probability_NV, column_N1, elsewhere_N, ignored_N)
        ctx.like = (logits_NV.shape, logits_NV.dtype)
        return (whole_sum_N.log() + whole_max_N - target_RN.sum(0)).masked_fill(ignored_N, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients):
        if torch.is_grad_enabled():  # create_graph=True: what is saved here would count as constant
            raise RuntimeError("vocab_parallel_cross_entropy can be differentiated only once")
        probability_NV, column_N1, elsewhere_N, ignored_N = ctx.saved_tensors
        shape, dtype = ctx.like
        gradient_N = gradients[0].masked_fill(ignored_N, 0.0)
        real_NV = probability_NV * gradient_N.unsqueeze(-1)
        if real_NV.shape[1]:
            real_NV.scatter_add_(1, column_N1, -gradient_N.masked_fill(elsewhere_N, 0.0).unsqueeze(-1))
        padding = shape[1] - real_NV.shape[1]
        whole_NV = F.pad(real_NV, (0, padding)) if padding else real_NV
        return whole_NV.to(dtype), None, None, None, None
