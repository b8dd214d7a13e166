"""Tensor parallelism by hand: linear layers, embedding and loss of a GPT split over an axis.

    module                     what a rank has                     what moves
    attn.c_attn, mlp.c_fc      its heads, its inner features       f: enter_region
    attn.c_proj, mlp.c_proj    the columns that read these         g: leave_region
    wte, lm_head, loss         its rows of the vocabulary          g, f, three numbers a token
    mlp of experts             the inner features of each          f before the router, g after the sum
    the rest                   all of it

So attention or MLP, a column-parallel layer and then a row-parallel one, costs one all-reduce forward and one
backward. Under sequence parallelism f and g become an all-gather and a reduce-scatter of the same bytes;
LayerNorms and the residual stream between two regions are split along the sequence. What is whole then has
on each rank a part of its gradient: `synchronize_replicated_gradients`. f, g and vocabulary: `megatron`.

B batch, T position, C embedding, M and N features out and in, R ranks.
Sources: Megatron-LM (arXiv 1909.08053), its sequence parallelism (arXiv 2205.05198).
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from compare.contract.communication import REPLICATED_GRADIENTS
from torchpar.comm.collectives import Axis
from torchpar.dropout import split_rows
from torchpar.manual.megatron import (
    SEQUENCE_DIM,
    Split,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    enter_region,
    leave_region,
    scatter,
)
from torchpar.mlp import Weight
from torchpar.model import GPT
from torchpar.sharding import Parameters, Sharding, TensorsByName, divide_gradient


class ColumnParallelLinear(nn.Module):
    """A linear layer whose output features are split: y_r = x W_r^T + b_r.

    The input is the same on all ranks, or with `sequence_dim` split along it; the output is this rank's
    features, over the whole sequence. A fused q, k, v has three `groups` of features, but with GQA.
    """

    parts = ("weight", "bias")

    def __init__(self, linear: nn.Linear, axis: Axis, *, groups: int = 1, sequence_dim: int | None = None):
        super().__init__()
        self.axis, self.sequence_dim = axis, sequence_dim
        self.split = Split(dim=0, size=linear.out_features, groups=groups)
        self.weight = self.split.parameter(linear.weight, axis)
        self.bias = None if linear.bias is None else self.split.parameter(linear.bias, axis)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, N), or (B, T / R, N) with `sequence_dim` -> y (B, T, M / R)."""
        x = enter_region(x, self.axis, self.sequence_dim)
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer whose input features are split: y = sum_r x_r W_r^T + b.

    The input is this rank's features; the output is the same on all ranks, or with `sequence_dim` split along
    it. The bias is whole on every rank, and added after the sum.
    """

    parts = ("weight",)

    def __init__(self, linear: nn.Linear, axis: Axis, *, sequence_dim: int | None = None):
        super().__init__()
        self.axis, self.sequence_dim = axis, sequence_dim
        self.split = Split(dim=1, size=linear.in_features)
        self.weight = self.split.parameter(linear.weight, axis)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, N / R) -> y (B, T, M), or (B, T / R, M) with `sequence_dim`."""
        y = leave_region(F.linear(x, self.weight), self.axis, self.sequence_dim)
        # In the dtype of the product, as an unsplit layer's under autocast.
        return y if self.bias is None else y + self.bias.to(y.dtype)


class ExpertsWeight(nn.Module):
    """The inner features of every expert that a rank has, along `dim` of (E, C, M) or (E, M, C).

    f and g are around the whole of a block's experts. Router and choice are the same on each rank; but its
    outputs are parts of sums, and so are its gradients of their weights, and of all that comes before: of the
    router's weight, and for that of the load-balance loss too.
    """

    parts = ("weight",)

    def __init__(self, whole: Weight, axis: Axis, *, dim: int):
        super().__init__()
        self.split = Split(dim=dim, size=whole.weight.shape[dim])
        self.weight = self.split.parameter(whole.weight, axis)

    def forward(self) -> torch.Tensor:
        return self.weight


def split_layers(model: GPT, axis: Axis, *, sequence_parallel: bool = False) -> Sharding:
    """Put split layers in the place of a GPT's, from outside; names of parameters stay, and what is tied.

    It is then called with targets: no rank has the logits. Under sequence parallelism residual stream and
    LayerNorms are split along the sequence.
    """
    sequence_dim = SEQUENCE_DIM if sequence_parallel else None
    column = partial(ColumnParallelLinear, axis=axis, sequence_dim=sequence_dim)
    row = partial(RowParallelLinear, axis=axis, sequence_dim=sequence_dim)
    weight, has_experts = partial(ExpertsWeight, axis=axis), model.balance is not None
    for block in model.blocks:
        for path, split in {
            "attn.c_attn": partial(column, groups=block.get_submodule("attn").qkv_parts),
            "attn.c_proj": row,
            "mlp.c_fc": partial(weight, dim=2) if has_experts else column,
            "mlp.c_proj": partial(weight, dim=1) if has_experts else row,
        }.items():
            block.set_submodule(path, split(block.get_submodule(path)))
        if has_experts:
            enters = lambda module, args: (enter_region(args[0], axis, sequence_dim), *args[1:])  # noqa: E731
            block.get_submodule("mlp").register_forward_pre_hook(enters)
            leaves = lambda module, args, y_BTC: leave_region(y_BTC, axis, sequence_dim)  # noqa: E731
            block.get_submodule("mlp.core").register_forward_hook(leaves)
    if model.balance:
        model.balance.register_forward_hook(lambda module, args, loss: divide_gradient(loss, axis.size))
    tokens = model.get_submodule("transformer.wte")
    assert isinstance(tokens, nn.Embedding)
    embedding = VocabParallelEmbedding(tokens, axis, sequence_dim=sequence_dim)
    head = column(model.lm_head)
    head.weight = embedding.weight  # tied, as before
    loss = VocabParallelCrossEntropy(axis, vocab_size=model.config.vocab_size)
    for path, split in (("transformer.wte", embedding), ("lm_head", head), ("loss", loss)):
        model.set_submodule(path, split)
    if sequence_parallel and "wpe" in model.transformer:
        positions = model.transformer["wpe"]
        positions.register_forward_pre_hook(lambda module, args: (scatter(args[0], axis, 0),))
    split_rows(model, axis.rank, sequence_parallel=sequence_parallel)
    splits = {
        f"{path}.{name}": module.split
        for path, module in model.named_modules()
        for name in getattr(module, "parts", ())
    }
    partial_sums = {
        name
        for name, _ in model.named_parameters()
        if name not in splits and (sequence_parallel or ".router." in name)
    }

    def finish_gradients(parameters: Parameters) -> None:
        # Each is whole, or a piece that all ranks of this axis cut alike.
        gradients = [parameters[name].grad for name in parameters if name in partial_sums]
        synchronize_replicated_gradients([g for g in gradients if g is not None], axis)

    def gather(pieces: TensorsByName) -> TensorsByName:
        return {
            name: splits[name].gather(piece, axis) if name in splits else piece
            for name, piece in pieces.items()
        }

    axes = dict.fromkeys(splits, (axis,))
    return Sharding(axes=axes, finish_gradients=finish_gradients, gather=gather)


def synchronize_replicated_gradients(gradients: Sequence[torch.Tensor], axis: Axis) -> None:
    """Sum gradients of whole parameters over ranks that each saw a part of the sequence, in one all-reduce.

    They are of LayerNorms, row-parallel biases (C,), positions (T, C); of one dtype and device.
    """
    if gradients:
        total = torch.cat([gradient.flatten() for gradient in gradients])
        axis.all_reduce(total, purpose=REPLICATED_GRADIENTS)
        for gradient, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
