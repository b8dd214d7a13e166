"""Tensor parallelism by hand: the linear layers of each block are split over an axis.

    module                        on each rank                        communication
    attn.c_attn, mlp.c_fc         some heads, some inner features     f in front
    attn.c_proj, mlp.c_proj       the columns that read them          g behind
    experts                       some inner features of every one    f before the router, g after the sum
    embedding                     some rows of the vocabulary         g behind: see `vocab_parallel`
    head, loss                    logits of these rows                f in front; in the loss one all-gather
    router                        all parameters                      once a step its gradient
    norms, row-parallel biases    all parameters                      with sequence parallelism as the router

The loss never gathers logits. `vocab_parallel` gathers three numbers a token from each rank: its largest
logit, its sum of exponentials, and the target's logit. Its backward sends nothing: softmax minus one-hot is
local.

Attention and MLP are each a column-parallel layer and then a row-parallel one. Between the two nothing moves.

                                  forward            backward
    CopyToRegion            f     identity           all-reduce
    ReduceFromRegion        g     all-reduce         identity
    GatherSequence          f     all-gather         reduce-scatter     with sequence parallelism
    ScatterSequence         g     reduce-scatter     all-gather         with sequence parallelism

With sequence parallelism the residual stream and the LayerNorms between two regions are split along the
sequence. The bytes are the same: an all-reduce is a reduce-scatter and an all-gather.

B batch, T position, N input features, M output features, R ranks.
Sources: Megatron-LM (arXiv 1909.08053), sequence parallelism (arXiv 2205.05198).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

from compare.contract.communication import ACTIVATION_GRADIENTS, ACTIVATIONS, REPLICATED_GRADIENTS
from torchpar.comm.collectives import Axis
from torchpar.manual.split import Split, sharding_of
from torchpar.model import GPT
from torchpar.positions import set_dropout_rows
from torchpar.sharding import Parameters, Sharding, divide_gradient

SEQUENCE_DIM = 1  # of activations (B, T, N)


class CopyToRegion(Function):
    """f: identity in forward, all-reduce in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor):
        # Every rank used x for its own features: sum the gradients of x over the ranks.
        return ctx.axis.all_reduce_copy(gradients[0], purpose=ACTIVATION_GRADIENTS), None


class ReduceFromRegion(Function):
    """g: all-reduce in forward, identity in backward."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, axis: Axis) -> torch.Tensor:
        # Every rank has the product of its own features: sum the partial outputs.
        return axis.all_reduce_copy(y, purpose=ACTIVATIONS)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor):
        return gradients[0], None


class GatherSequence(Function):
    """f with sequence parallelism: all-gather along the sequence in forward, reduce-scatter in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        # The region computes on whole sequences: gather the positions of all ranks.
        return axis.all_gather_dim(x, SEQUENCE_DIM, purpose=ACTIVATIONS)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor):
        # Sum the gradients as CopyToRegion does, and return to this rank only its own positions.
        return ctx.axis.reduce_scatter_dim(gradients[0], SEQUENCE_DIM, purpose=ACTIVATION_GRADIENTS), None


class ScatterSequence(Function):
    """g with sequence parallelism: reduce-scatter along the sequence in forward, all-gather in backward."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        # Sum the partial outputs as ReduceFromRegion does, and keep only this rank's positions.
        return axis.reduce_scatter_dim(y, SEQUENCE_DIM, purpose=ACTIVATIONS)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor):
        # Every rank's features reached all positions: gather the gradients of all positions.
        return ctx.axis.all_gather_dim(gradients[0], SEQUENCE_DIM, purpose=ACTIVATION_GRADIENTS), None


def enter_region(x: torch.Tensor, axis: Axis, *, sequence_parallel: bool) -> torch.Tensor:
    """f: x (B, T, N), or with sequence parallelism (B, T / R, N), to (B, T, N)."""
    return (GatherSequence if sequence_parallel else CopyToRegion).apply(x, axis)


def leave_region(y: torch.Tensor, axis: Axis, *, sequence_parallel: bool) -> torch.Tensor:
    """g: a partial sum y (B, T, M) to the sum (B, T, M), or with sequence parallelism (B, T / R, M)."""
    return (ScatterSequence if sequence_parallel else ReduceFromRegion).apply(y, axis)


class ColumnParallelLinear(nn.Module):
    """A linear layer whose output features are split: y_r = f(x) W_r^T + b_r.

    The fused q, k, v has three `groups` of features. With grouped queries it has one.
    """

    parts = ("weight", "bias")

    def __init__(self, linear: nn.Linear, axis: Axis, *, sequence_parallel: bool, groups: int = 1):
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.split = Split(dim=0, size=linear.out_features, groups=groups)
        self.weight = self.split.parameter(linear.weight, axis)
        self.bias = None if linear.bias is None else self.split.parameter(linear.bias, axis)
        self.linear: Callable[..., torch.Tensor] = F.linear  # `zero_bubble` sets another

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, N), or with sequence parallelism (B, T / R, N), to y (B, T, M / R)."""
        x = enter_region(x, self.axis, sequence_parallel=self.sequence_parallel)
        return self.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer whose input features are split: y = g(x_r W_r^T) + b. Every rank has all of b."""

    parts = ("weight",)

    def __init__(self, linear: nn.Linear, axis: Axis, *, sequence_parallel: bool):
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.split = Split(dim=1, size=linear.in_features)
        self.weight = self.split.parameter(linear.weight, axis)
        self.bias = linear.bias
        self.linear: Callable[..., torch.Tensor] = F.linear  # `zero_bubble` sets another

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, N / R) to y (B, T, M), or with sequence parallelism (B, T / R, M)."""
        y = leave_region(self.linear(x, self.weight), self.axis, sequence_parallel=self.sequence_parallel)
        # The bias is added once, after the sum; with autocast in the dtype of the product.
        return y if self.bias is None else y + self.bias.to(y.dtype)


def split_layers(model: GPT, axis: Axis, *, sequence_parallel: bool) -> Sharding:
    """Replace the linear layers of a GPT's blocks by split ones. Names of parameters stay."""
    column = partial(ColumnParallelLinear, axis=axis, sequence_parallel=sequence_parallel)
    row = partial(RowParallelLinear, axis=axis, sequence_parallel=sequence_parallel)
    splits: dict[str, Split] = {}
    for number, block in enumerate(model.blocks):
        groups = block.get_submodule("attn").qkv_parts
        kinds = {"attn.c_attn": partial(column, groups=groups), "attn.c_proj": row}
        if not model.balance:
            kinds |= {"mlp.c_fc": column, "mlp.c_proj": row}
        for path, kind in kinds.items():
            layer = kind(block.get_submodule(path))
            block.set_submodule(path, layer)
            splits |= {f"transformer.h.{number}.{path}.{name}": layer.split for name in layer.parts}
        if model.balance:
            of_experts = split_experts(block.get_submodule("mlp"), axis, sequence_parallel=sequence_parallel)
            splits |= {f"transformer.h.{number}.mlp.{name}": split for name, split in of_experts.items()}
    if model.balance:  # every rank computes the whole loss, and f sums the ranks' gradients of x
        model.balance.register_forward_hook(lambda module, args, loss: divide_gradient(loss, axis.size))
    if sequence_parallel and "wpe" in model.transformer:
        positions = model.transformer["wpe"]
        positions.register_forward_pre_hook(lambda module, args: args[0].chunk(axis.size)[axis.rank])
    set_dropout_rows(model, axis.rank, sequence_parallel=sequence_parallel)
    partial_sums = {
        name
        for name, _ in model.named_parameters()
        if name not in splits and "wte" not in name and (sequence_parallel or ".router." in name)
    }

    def finish_gradients(parameters: Parameters) -> None:
        gradients = [parameters[name].grad for name in parameters if name in partial_sums]
        sum_replicated_gradients([g for g in gradients if g is not None], axis)

    return sharding_of(splits, axis, finish_gradients=finish_gradients)


def split_experts(experts: nn.Module, axis: Axis, *, sequence_parallel: bool) -> dict[str, Split]:
    """Split the inner features of every expert. Each rank chooses the same experts for a token.

    Its outputs are partial sums. So are its gradients of the router's weight and of the layers before.
    """
    splits = {}
    for name, dim in {"c_fc": 2, "c_proj": 1}.items():  # (E, C, M) and (E, M, C)
        module = experts.get_submodule(name)
        weight = module.get_parameter("weight")
        splits[f"{name}.weight"] = split = Split(dim=dim, size=weight.shape[dim])
        module.register_parameter("weight", split.parameter(weight, axis))
    f = partial(enter_region, axis=axis, sequence_parallel=sequence_parallel)
    g = partial(leave_region, axis=axis, sequence_parallel=sequence_parallel)
    experts.register_forward_pre_hook(lambda module, args: (f(args[0]), *args[1:]))
    experts.get_submodule("core").register_forward_hook(lambda module, args, y_BTC: g(y_BTC))
    return splits


def sum_replicated_gradients(gradients: Sequence[torch.Tensor], axis: Axis) -> None:
    """Sum, once a step, the gradients of replicated parameters that each rank has of its positions.

    With sequence parallelism these are LayerNorms, row-parallel biases (C,) and positions (T, C). The
    router's weight is one always.
    """
    if gradients:
        # One all-reduce for all of them: each is small.
        total = torch.cat([gradient.flatten() for gradient in gradients])
        axis.all_reduce(total, purpose=REPLICATED_GRADIENTS)
        for gradient, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
