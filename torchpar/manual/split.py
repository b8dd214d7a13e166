"""Parameters split along a dim over an axis, and how the record gathers them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from compare.contract.communication import RECORD
from torchpar.comm.collectives import Axis
from torchpar.sharding import Parameters, Sharding, TensorsByName


@dataclass(frozen=True)
class Split:
    """How a parameter is split over an axis. Zeros pad a size that the ranks do not divide.

    Attributes:
        dim: the dim that is split.
        size: the full size of that dim.
        groups: equal groups along `dim`, such as q, k and v, each of which is split by itself. One cut
            through all of them would give q to the first rank and v to the last.
    """

    dim: int
    size: int
    groups: int = 1

    def parameter(self, full: torch.Tensor, axis: Axis) -> nn.Parameter:
        """Copy this rank's chunk, (..., d / R, ...), of a parameter (..., d, ...)."""
        group = self.size // self.groups
        share = -(-group // axis.size)
        grouped = full.detach().unflatten(self.dim, (self.groups, group))
        chunk = grouped.new_zeros((*full.shape[: self.dim], self.groups, share, *full.shape[self.dim + 1 :]))
        start, stop = min(axis.rank * share, group), min((axis.rank + 1) * share, group)
        chunk.narrow(self.dim + 1, 0, stop - start).copy_(grouped.narrow(self.dim + 1, start, stop - start))
        return nn.Parameter(chunk.flatten(self.dim, self.dim + 1))

    def gather(self, chunk: torch.Tensor, axis: Axis) -> torch.Tensor:
        """Gather the full tensor, (..., d, ...), from every rank's chunk. All ranks call this together."""
        grouped = chunk.unflatten(self.dim, (self.groups, -1))
        full = axis.all_gather_dim(grouped, self.dim + 1, purpose=RECORD)
        return full.narrow(self.dim + 1, 0, self.size // self.groups).flatten(self.dim, self.dim + 1)


def sharding_of(
    splits: Mapping[str, Split],
    axis: Axis,
    *,
    finish_gradients: Callable[[Parameters], None] = lambda parameters: None,
) -> Sharding:
    """The sharding of parameters that are split over `axis`, by the model's names."""

    def gather(shards: TensorsByName) -> TensorsByName:
        return {n: splits[n].gather(shard, axis) if n in splits else shard for n, shard in shards.items()}

    axes = dict.fromkeys(splits, (axis,))
    return Sharding(axes=axes, finish_gradients=finish_gradients, gather=gather)
