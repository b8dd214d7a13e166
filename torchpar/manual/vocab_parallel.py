"""A vocabulary that tensor parallelism splits: embedding, head and cross-entropy.

    embedding     looks up the ids of its rows         g sums the ranks' vectors
    head          columns of the logits                f in front, as any column-parallel layer
    loss          its own columns                      gathers three numbers a token

No rank has all logits of a token.

N tokens, V this rank's rows of the vocabulary, R ranks.
Source: Megatron-LM (arXiv 1909.08053, section 3).
"""

from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

from compare.contract.communication import LOSS
from torchpar.comm.collectives import Axis
from torchpar.manual.split import Split, sharding_of
from torchpar.manual.tensor_parallel import ColumnParallelLinear, leave_region
from torchpar.model import GPT
from torchpar.sharding import Sharding


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are split. Zeros pad the rows of the last ranks."""

    def __init__(self, embedding: nn.Embedding, axis: Axis, *, sequence_parallel: bool):
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.split = Split(dim=0, size=embedding.num_embeddings)
        self.weight = self.split.parameter(embedding.weight, axis)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (B, T) to vectors (B, T, C), or with sequence parallelism (B, T / R, C)."""
        local = ids - self.axis.rank * len(self.weight)
        elsewhere = (local < 0) | (local >= len(self.weight))
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        x = x.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        # One rank has the vector of an id, the others have zeros: the sum is the vector.
        return leave_region(x, self.axis, sequence_parallel=self.sequence_parallel)


class VocabParallelCrossEntropy(nn.Module):
    """Mean cross-entropy of logits whose vocabulary is split. Columns past `vocab_size` are padding."""

    def __init__(self, axis: Axis, *, vocab_size: int):
        super().__init__()
        self.axis, self.vocab_size = axis, vocab_size

    def forward(self, logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        """This rank's logits (N, V), and target ids of the full vocabulary, to the mean in nats, ()."""
        return CrossEntropy.apply(logits_NV, targets_N, self.axis, self.vocab_size).mean()


class CrossEntropy(Function):
    """Cross-entropy of each token, (N,), in float32 at least."""

    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, targets_N: torch.Tensor, axis: Axis, vocab_size: int):
        start = axis.rank * logits_NV.shape[1]
        real = min(max(vocab_size - start, 0), logits_NV.shape[1])  # columns that are not padding
        x_NV = logits_NV[:, :real].to(torch.promote_types(logits_NV.dtype, torch.float32))
        max_N = x_NV.amax(-1) if real else x_NV.new_full(x_NV.shape[:1], -torch.inf)
        exp_NV = (x_NV - max_N.unsqueeze(-1)).exp()
        elsewhere_N = (targets_N < start) | (targets_N >= start + real)
        column_N1 = (targets_N - start).masked_fill(elsewhere_N, 0).unsqueeze(-1)
        target_N = x_NV.gather(1, column_N1).squeeze(-1) if real else x_NV.new_zeros(x_NV.shape[:1])
        # Gather each rank's maximum, sum of exponentials and target logit: three numbers a token.
        mine_31N = torch.stack([max_N, exp_NV.sum(-1), target_N.masked_fill(elsewhere_N, 0.0)])[:, None]
        max_RN, sum_RN, target_RN = axis.all_gather_dim(mine_31N, 1, purpose=LOSS)
        # Each sum is relative to its rank's own maximum: rescale it to the global one.
        global_max_N = max_RN.amax(0)
        global_sum_N = (sum_RN * (max_RN - global_max_N).exp()).sum(0)
        probability_NV = exp_NV.mul_(((max_N - global_max_N).exp() / global_sum_N).unsqueeze(-1))
        ctx.save_for_backward(probability_NV, column_N1, elsewhere_N)
        ctx.like = (logits_NV.shape, logits_NV.dtype)
        return global_sum_N.log() + global_max_N - target_RN.sum(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor):
        # softmax - onehot(target), on this rank's columns: nothing moves.
        probability_NV, column_N1, elsewhere_N = ctx.saved_tensors
        shape, dtype = ctx.like
        real_NV = probability_NV * gradients[0].unsqueeze(-1)
        if real_NV.shape[1]:
            real_NV.scatter_add_(1, column_N1, -gradients[0].masked_fill(elsewhere_N, 0.0).unsqueeze(-1))
        padding = shape[1] - real_NV.shape[1]
        return (F.pad(real_NV, (0, padding)) if padding else real_NV).to(dtype), None, None, None


def split_vocabulary(model: GPT, axis: Axis, *, sequence_parallel: bool) -> Sharding:
    """Replace a GPT's token embedding, head and loss by split ones. The head stays tied."""
    tokens = model.get_submodule("transformer.wte")
    assert isinstance(tokens, nn.Embedding)
    embedding = VocabParallelEmbedding(tokens, axis, sequence_parallel=sequence_parallel)
    head = ColumnParallelLinear(model.lm_head, axis, sequence_parallel=sequence_parallel)
    head.weight = embedding.weight
    model.set_submodule("transformer.wte", embedding)
    model.set_submodule("lm_head", head)
    model.set_submodule("loss", VocabParallelCrossEntropy(axis, vocab_size=model.config.vocab_size))
    return sharding_of({"transformer.wte.weight": embedding.split}, axis)
