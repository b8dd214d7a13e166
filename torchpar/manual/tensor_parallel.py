"""Tensor parallelism by hand: linear layers, embedding and loss split over an axis, for any module.

    ColumnParallelLinear    copy_to_region (f), then a product of all inputs and some outputs
    RowParallelLinear       a product of some inputs and all outputs, then reduce_from_region (g)

So an attention or an MLP, a column-parallel layer and then a row-parallel one, costs one all-reduce forward
and one backward. Under sequence parallelism f and g become an all-gather and a reduce-scatter of the same
bytes, and LayerNorms and the residual stream between two regions are split along the sequence.

B batch, T position, C embedding.
Sources: Megatron-LM (arXiv 1909.08053), its sequence parallelism (arXiv 2205.05198).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from compare.contract.communication import REPLICATED_GRADIENTS
from compare.numerics.parameters import QKV
from torchpar.comm.collectives import Axis
from torchpar.dropout import split_rows
from torchpar.manual.megatron.mappings import (
    SEQUENCE_DIM,
    all_gather_to_region,
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    reduce_scatter_from_region,
    scatter_to_region,
)
from torchpar.manual.megatron.split import Split, SplitLayer, require_plain, split_layers_of, take_parameter
from torchpar.manual.megatron.vocab_parallel import VocabParallelCrossEntropy, VocabParallelEmbedding
from torchpar.model import GPT
from torchpar.swap import swap


def split_layers(model: GPT, axis: Axis, *, sequence_parallel: bool = False) -> "TensorParallel":
    """Swap the layers of a GPT for split ones, from outside; names of parameters stay.

    Attention is split by head, the MLP by its inner features, embedding, head and loss by vocabulary, which
    is padded where the ranks do not divide it.

    Args:
        model: whole, and the same on all ranks. Call it with targets: without any, no rank has the logits.
        axis: its size divides the heads, and under sequence parallelism the positions of a batch.
        sequence_parallel: split the residual stream and the LayerNorms along the sequence.
    """
    sequence_dim = SEQUENCE_DIM if sequence_parallel else None
    column = partial(ColumnParallelLinear.from_linear, axis=axis, sequence_dim=sequence_dim)
    row = partial(RowParallelLinear.from_linear, axis=axis, sequence_dim=sequence_dim)
    embedding = partial(VocabParallelEmbedding.from_embedding, axis=axis, sequence_dim=sequence_dim)
    loss = VocabParallelCrossEntropy(axis, vocab_size=model.config.vocab_size)
    swap(
        model,
        {
            "transformer.wte": embedding,
            "transformer.h.*.attn.c_attn": partial(column, groups=QKV),
            "transformer.h.*.attn.c_proj": row,
            "transformer.h.*.mlp.c_fc": column,
            "transformer.h.*.mlp.c_proj": row,
            "lm_head": partial(column, padded=True),
            "loss": lambda whole: loss,
        },
    )
    if sequence_parallel:
        positions = model.get_submodule("transformer.wpe")
        positions.register_forward_pre_hook(lambda module, args: (scatter_to_region(args[0], axis, dim=0),))
    split_rows(model, axis.rank, sequence_parallel=sequence_parallel)
    model.register_forward_pre_hook(_require_targets, with_kwargs=True)
    splits = _splits(model)
    whole = frozenset(name for name, _ in model.named_parameters() if name not in splits)
    return TensorParallel(axis, splits, whole if sequence_parallel else frozenset())


class ColumnParallelLinear(SplitLayer):
    """A linear layer whose output features are split: y_r = x W_r^T + b_r.

    Make it with `from_linear`. The input is the same on all ranks, or with `sequence_dim` split along it;
    the output is this rank's features, over the whole sequence.

        >>> axis = Axis.of(None)
        >>> whole = nn.Linear(8, 32)
        >>> split = ColumnParallelLinear.from_linear(whole, axis)
        >>> split.weight.shape == (32 // axis.size, 8)
        True
        >>> split(torch.ones(4, 8)).shape == (4, 32 // axis.size)
        True

    Attributes:
        weight, bias: this rank's rows.
        split: of both, along dim 0.
    """

    parts = ("weight", "bias")

    def __init__(
        self, linear: nn.Linear, axis: Axis, *, split: Split, sequence_dim: int | None, gather_output: bool
    ):
        super().__init__()
        self.axis, self.split = axis, split
        self.sequence_dim, self.gather_output = sequence_dim, gather_output
        self.weight = take_parameter(linear.weight, split, axis)
        self.bias = None if linear.bias is None else take_parameter(linear.bias, split, axis)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        axis: Axis,
        *,
        groups: int = 1,
        sequence_dim: int | None = None,
        gather_output: bool = False,
        padded: bool = False,
    ) -> "ColumnParallelLinear":
        """Split a layer that is the same on all ranks.

        Args:
            linear: weight (out, in).
            axis: the ranks.
            groups: the output is this many tensors side by side (3 for a fused q, k, v), each split for
                itself: a cut through the middle would give one rank all of q and another all of v.
            sequence_dim: the input is split along this dim, and gathered first.
            gather_output: put the output together again on all ranks.
            padded: let output features be padded with zeros where the ranks do not divide them.

        Raises:
            TypeError: this is no plain nn.Linear: see `require_plain`.
            ValueError: the ranks do not divide the output features, or those of a group.
        """
        require_plain(cls, nn.Linear, linear)
        split = Split(dim=0, size=linear.out_features, groups=groups, padded=padded)
        return cls(linear, axis, split=split, sequence_dim=sequence_dim, gather_output=gather_output)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., N) -> y (..., M / R) on each of R ranks, (..., M) with gather_output."""
        if self.sequence_dim is None:
            x = copy_to_region(x, self.axis)
        else:
            x = all_gather_to_region(x, self.axis, dim=self.sequence_dim)
        y = F.linear(x, self.weight, self.bias)
        if not self.gather_output:
            return y
        group = self.split.size // self.split.groups
        grouped = gather_from_region(y.unflatten(-1, (self.split.groups, -1)), self.axis)
        return grouped[..., :group].flatten(-2)


class RowParallelLinear(SplitLayer):
    """A linear layer whose input features are split: y = sum_r x_r W_r^T + b.

    Make it with `from_linear`. The input is this rank's features; the output is the same on all ranks, or
    with `sequence_dim` split along it. The bias is whole on every rank, and added after the sum.

        >>> axis = Axis.of(None)
        >>> up = ColumnParallelLinear.from_linear(nn.Linear(8, 32), axis)
        >>> down = RowParallelLinear.from_linear(nn.Linear(32, 8), axis)
        >>> x = torch.ones(4, 8)                        # the same on all ranks
        >>> y = down(nn.functional.gelu(up(x)))         # and so is this: one all-reduce
        >>> y.sum().backward()                          # another one, for the gradient of x
        >>> down.weight.grad.shape == (8, 32 // axis.size)
        True

    Attributes:
        weight: this rank's columns.
        bias: the whole one.
        split: of the weight, along dim 1.
    """

    def __init__(self, linear: nn.Linear, axis: Axis, *, split_input: bool, sequence_dim: int | None):
        super().__init__()
        self.axis, self.split = axis, Split(dim=1, size=linear.in_features)
        self.split_input, self.sequence_dim = split_input, sequence_dim
        self.weight = take_parameter(linear.weight, self.split, axis)
        self.bias = linear.bias

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, axis: Axis, *, split_input: bool = False, sequence_dim: int | None = None
    ) -> "RowParallelLinear":
        """Split a layer that is the same on all ranks.

        Args:
            linear: weight (out, in).
            axis: the ranks.
            split_input: the input is whole on all ranks: take this rank's features of it first.
            sequence_dim: leave the output split along this dim. The gradient of the bias is then this
                rank's share of it, to be summed over the axis: see `synchronize_replicated_gradients`.

        Raises:
            TypeError: this is no plain nn.Linear: see `require_plain`.
            ValueError: the ranks do not divide the input features.
        """
        require_plain(cls, nn.Linear, linear)
        return cls(linear, axis, split_input=split_input, sequence_dim=sequence_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., N / R) on each of R ranks, (..., N) with split_input -> y (..., M)."""
        if self.split_input:
            x = scatter_to_region(x, self.axis)
        partial = F.linear(x, self.weight)
        if self.sequence_dim is None:
            y = reduce_from_region(partial, self.axis)
        else:
            y = reduce_scatter_from_region(partial, self.axis, dim=self.sequence_dim)
        # In the dtype of the product, as an unsplit layer's under autocast.
        return y if self.bias is None else y + self.bias.to(y.dtype)


def synchronize_replicated_gradients(gradients: Sequence[torch.Tensor], axis: Axis) -> None:
    """Sum gradients of whole parameters over ranks that each saw a part of the sequence, in one all-reduce.

    Args:
        gradients: of LayerNorms, row-parallel biases (C,), positions (T, C); of one dtype and device.
        axis: the ranks.
    """
    if axis.size == 1 or not gradients:
        return
    total = torch.cat([gradient.flatten() for gradient in gradients])
    axis.all_reduce(total, purpose=REPLICATED_GRADIENTS)
    for gradient, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


@dataclass(frozen=True)
class TensorParallel:
    """A module after `split_layers`: which of its parameters are split, and how.

    Attributes:
        axis: the ranks.
        splits: how a parameter is split, by its name; the others are whole.
        partial: names of whole parameters whose gradient is this rank's part of it.
    """

    axis: Axis
    splits: Mapping[str, Split]
    partial: frozenset[str]


def _splits(model: nn.Module) -> dict[str, Split]:
    return {name: layer.split for name, layer in split_layers_of(model).items()}


def _require_targets(model: nn.Module, args: tuple, kwargs: dict) -> None:
    if len(args) < 2 and kwargs.get("targets") is None:
        raise ValueError("a tensor-parallel model needs targets: its logits are split over the vocabulary")
