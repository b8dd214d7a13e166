"""Megatron's mappings f and g: collectives with a derivative, at both ends of a region of split work.

                                forward            backward
    copy_to_region              as it is           all-reduce           f
    reduce_from_region          all-reduce         as it is             g
    scatter_to_region           this rank's part   all-gather
    gather_from_region          all-gather         this rank's part
    all_gather_to_region        all-gather         reduce-scatter       f under sequence parallelism
    reduce_scatter_from_region  reduce-scatter     all-gather           g under sequence parallelism

    >>> axis = Axis.of(None)
    >>> x = torch.ones(3, requires_grad=True)               # the same on all ranks
    >>> y = reduce_from_region(copy_to_region(x, axis) * (axis.rank + 1), axis)
    >>> y.sum().backward()
    >>> y.tolist(), x.grad.tolist()                         # on four ranks: 1 + 2 + 3 + 4
    ([10.0, 10.0, 10.0], [10.0, 10.0, 10.0])

A plain all-reduce inside a module would be differentiated as if it were no collective at all: gradients
would be wrong without an error. Sources: Megatron-LM (arXiv 1909.08053), its sequence parallelism
(arXiv 2205.05198).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from compare.contract.communication import ACTIVATION_GRADIENTS, ACTIVATIONS
from torchpar.comm.collectives import Axis
from torchpar.comm.untraced import untraced

_Movement = Callable[[torch.Tensor, Axis, str], torch.Tensor]
SEQUENCE_DIM = 1  # of activations (B, T, C)


def copy_to_region(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """f: x, any shape, shared by all ranks, for computations that differ by rank."""
    return x if axis.size == 1 else _move(x, axis, _same, _all_reduce)


def reduce_from_region(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """g: the sum of the ranks' x, of its shape, shared by all ranks."""
    return x if axis.size == 1 else _move(x, axis, _all_reduce, _same)


def scatter_to_region(x: torch.Tensor, axis: Axis, *, dim: int = -1) -> torch.Tensor:
    """This rank's part, (.., d / R, ..) at `dim`, of a tensor (.., d, ..) that all R ranks share.

    Raises:
        ValueError: R does not divide d.
    """
    return x if axis.size == 1 else _move(x, axis, _AlongDim(dim).take, _AlongDim(dim).all_gather)


def gather_from_region(x: torch.Tensor, axis: Axis, *, dim: int = -1) -> torch.Tensor:
    """Parts (.., d, ..) of R ranks joined at `dim`: (.., R d, ..), for computations that all ranks repeat."""
    return x if axis.size == 1 else _move(x, axis, _AlongDim(dim).all_gather, _AlongDim(dim).take)


def all_gather_to_region(x: torch.Tensor, axis: Axis, *, dim: int = SEQUENCE_DIM) -> torch.Tensor:
    """Parts (.., d, ..) of R ranks joined at `dim`: (.., R d, ..), for computations that differ by rank."""
    along = _AlongDim(dim)
    return x if axis.size == 1 else _move(x, axis, along.all_gather, along.reduce_scatter)


def reduce_scatter_from_region(x: torch.Tensor, axis: Axis, *, dim: int = SEQUENCE_DIM) -> torch.Tensor:
    """This rank's part, (.., d / R, ..) at `dim`, of the sum of x, (.., d, ..), over R ranks."""
    along = _AlongDim(dim)
    return x if axis.size == 1 else _move(x, axis, along.reduce_scatter, along.all_gather)


@untraced
def _move(x: torch.Tensor, axis: Axis, forward: _Movement, backward: _Movement) -> torch.Tensor:
    return _Mapping.apply(x, axis, forward, backward)


class _Mapping(torch.autograd.Function):
    """One movement of data forward, and its transpose backward, which can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x, axis, forward, backward, purpose=ACTIVATIONS):
        ctx.axis, ctx.forward_move, ctx.backward_move = axis, forward, backward
        return forward(x, axis, purpose)

    @staticmethod
    def backward(ctx: Any, *gradients):
        # Not the plain move: a second derivative goes through this one, whose transpose is the forward's.
        moves = (ctx.backward_move, ctx.forward_move)
        gradient = _Mapping.apply(gradients[0], ctx.axis, *moves, ACTIVATION_GRADIENTS)
        return gradient, None, None, None, None


def _same(x: torch.Tensor, axis: Axis, purpose: str) -> torch.Tensor:
    return x.view_as(x)


def _all_reduce(x: torch.Tensor, axis: Axis, purpose: str) -> torch.Tensor:
    # A copy: x may be kept for a backward, as selective recomputation keeps products.
    total = x.clone(memory_format=torch.contiguous_format)
    axis.all_reduce(total, purpose=purpose)
    return total


@dataclass(frozen=True)
class _AlongDim:
    """Movements along one dim of a tensor."""

    dim: int

    def take(self, x: torch.Tensor, axis: Axis, purpose: str) -> torch.Tensor:
        return self._parts(x, axis)[axis.rank].contiguous()

    def all_gather(self, x: torch.Tensor, axis: Axis, purpose: str) -> torch.Tensor:
        return torch.cat(gather_parts(x, axis, purpose), dim=self.dim)

    def reduce_scatter(self, x: torch.Tensor, axis: Axis, purpose: str) -> torch.Tensor:
        stacked = torch.stack(self._parts(x, axis))
        mine = torch.empty_like(stacked[0])
        axis.reduce_scatter(mine.view(-1), stacked.view(-1), purpose=purpose)
        return mine

    def _parts(self, x: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, ...]:
        if x.shape[self.dim] % axis.size:
            raise ValueError(
                f"{axis.name} = {axis.size} does not divide dim {self.dim} of a tensor {tuple(x.shape)}"
            )
        return x.chunk(axis.size, dim=self.dim)


def gather_parts(x: torch.Tensor, axis: Axis, purpose: str) -> list[torch.Tensor]:
    """Every rank's x, of one shape, in the order of ranks."""
    whole = x.new_empty((axis.size, *x.shape))
    axis.all_gather(whole.view(-1), x.contiguous().view(-1), purpose=purpose)
    return list(whole.unbind())
