"""Placement of every parameter: which mesh axis splits which dim, and the padding that makes shards equal.

All engines store the same arrays in the same places. The table of axes (`compare.spec.axes`) names the dims
that pp, tp and ep split. ZeRO's axes, dp_shard and ep, split one further dim together:

    which dim   the first that they divide, if possible one that tp does not split: shards are then contiguous
    otherwise   the largest dim, padded with zeros; their gradients are zero, so they stay zero
    never       the layers, since a scan walks along them
    experts     ep splits them by the table, and dp_shard alone is ZeRO's

Layers are stored in the order of the pp ranks that run them. This is the only module with padding; the model
masks the logits of a padded vocabulary (`Embedding.logits`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from compare.spec.axes import LAYER, PP, SHARDS, SPLIT
from compare.spec.experiment import Experiment, Layout
from jaxpar.weights import logical_axes, parameter_shapes


class ShardSizes(NamedTuple):
    """Number of shards of a dim before ZeRO splits it, and the size of each without and with padding."""

    count: int
    size: int
    padded: int


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Placement of one parameter.

    Attributes:
        shape: full shape without padding.
        dims: mesh axis -> the dim that it splits. ZeRO's axes come last: they split shards of the others.
        shards: ZeRO's mesh axes, which split one dim together, or ().
        degrees: mesh axis -> number of its devices.
        chunks: number of stages of a pp rank: rank, rank + pp, rank + 2 pp, ...
    """

    shape: tuple[int, ...]
    dims: Mapping[str, int]
    degrees: Mapping[str, int]
    chunks: int = 1
    shards: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that split the parameter. The devices along the other axes have copies."""
        return tuple(self.dims)

    @property
    def shard_dim(self) -> int | None:
        """The dim that ZeRO splits."""
        return self.dims[self.shards[0]] if self.shards else None

    def spec(self, *, sharded: bool) -> P:
        """PartitionSpec; it includes ZeRO's axes if `sharded`."""
        axes = [
            tuple(
                axis for axis, at in self.dims.items() if at == dim and (sharded or axis not in self.shards)
            )
            for dim in range(len(self.shape))
        ]
        return P(*(names if len(names) > 1 else names[0] if names else None for names in axes))

    def shard_sizes(self, dim: int) -> ShardSizes:
        """Shards of a dim."""
        others = (a for a, at in self.dims.items() if at == dim and a not in self.shards)
        count = math.prod(self.degrees[a] for a in others)
        shards = math.prod(self.degrees[a] for a in self.shards) if self.shard_dim == dim else 1
        size = -(-self.shape[dim] // count)
        return ShardSizes(count, size, -(-size // shards) * shards)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Full shape with padding."""
        return tuple(count * padded for count, _, padded in map(self.shard_sizes, range(len(self.shape))))

    def unpadded_range(self, dim: int, start: int, stop: int) -> tuple[int, int]:
        """Range without padding of a range [start, stop) in one shard of a padded dim. It may be empty.

        Padding is at the end of each shard. Not for the layers, whose order differs.
        """
        _, size, padded = self.shard_sizes(dim)
        shard = start // padded if padded else 0
        first, last = (shard * size + min(entry - shard * padded, size) for entry in (start, stop))
        return min(first, self.shape[dim]), min(last, self.shape[dim])

    def stored_layers(self) -> list[int]:
        """The layer that each index of the leading dim stores, of a parameter with stacked layers."""
        return self._reorder_layers(np.arange(self.shape[0]), self.chunks, self.degrees[PP]).tolist()

    def pad(self, x: np.ndarray) -> np.ndarray:
        """An array of `shape` as stored, in `padded_shape`."""
        x = self._reorder_layers(x, self.chunks, self.degrees[PP])
        for dim in set(self.dims.values()):
            count, size, padded = self.shard_sizes(dim)
            x = _resize(x, dim, count * size)
            x = merge_dims(_resize(split_dim(x, dim, count, -1), dim + 1, padded), dim)
        return x

    def unpad_shards(self, x: Any) -> Any:
        """Remove ZeRO's padding, of an array in `padded_shape` or one device's part of it without ZeRO."""
        dim = self.shard_dim
        if dim is None:
            return x
        _, size, padded = self.shard_sizes(dim)
        if size == padded:
            return x
        count = x.shape[dim] // padded
        if count == 1:
            return _resize(x, dim, size)
        return merge_dims(_resize(split_dim(x, dim, count, -1), dim + 1, size), dim)

    def unpad(self, x: Any) -> Any:
        """Inverse of `pad`."""
        x = self._reorder_layers(self.unpad_shards(x), self.degrees[PP], self.chunks)
        for dim, size in enumerate(self.shape):
            x = _resize(x, dim, size)
        return x

    def _reorder_layers(self, x: Any, outer: int, inner: int) -> Any:
        """Layers (outer, inner, layers of a stage) -> (inner, outer, layers of a stage)."""
        dim = self.dims.get(PP)
        if dim is None or self.chunks == 1:
            return x
        before, after = x.shape[:dim], x.shape[dim + 1 :]
        x = x.reshape(*before, outer, inner, -1, *after)
        return x.swapaxes(dim, dim + 1).reshape(*before, -1, *after)


def place(shape: tuple[int, ...], axes: tuple[str, ...], layout: Layout) -> Placement:
    """Placement of a parameter of this shape, with a logical axis for each dim."""
    dims: dict[str, int] = {}
    for dim, logical in enumerate(axes):
        axis = SPLIT.get(logical)
        if axis and layout.axes[axis] > 1:
            dims.setdefault(axis, dim)
    placement = Placement(shape=shape, dims=dims, degrees=layout.axes, chunks=layout.chunks)
    candidates = [dim for dim, logical in enumerate(axes) if logical != LAYER]
    shards = tuple(axis for axis in SHARDS if layout.axes[axis] > 1 and axis not in dims)
    count = math.prod(layout.axes[axis] for axis in shards)
    if not layout.zero or count == 1 or not candidates or not math.prod(shape):
        return placement

    def preference(dim: int) -> tuple[bool, bool, int]:
        size = placement.shard_sizes(dim).size
        divides = size % count == 0
        return divides, dim not in dims.values(), -dim if divides else size

    dim = max(candidates, key=preference)
    return replace(placement, dims={**dims, **dict.fromkeys(shards, dim)}, shards=shards)


def place_parameters(experiment: Experiment) -> Any:
    """A tree with the `Placement` of each parameter."""
    shapes, axes = parameter_shapes(experiment), logical_axes(experiment.model)
    return jax.tree.map(lambda leaf, axes: place(leaf.shape, axes, experiment.layout), shapes, axes)


def map_placed(f: Callable[[Placement, Any], Any], tree: Any, placements: Any) -> Any:
    """f(placement, leaf) under the top-level keys of `placements`; leaves under other keys stay."""
    return {
        key: jax.tree.map(f, placements[key], tree[key]) if key in placements else tree[key] for key in tree
    }


def map_repeated(f: Callable[[Any], Any], axis: str, placements: Any, tree: Any) -> Any:
    """f(leaf) for the leaves that a mesh axis does not split; the leaves that it splits stay."""
    return jax.tree.map(lambda p, x: x if axis in p.dims else f(x), placements, tree)


def unpad(params: Any, placements: Any) -> Any:
    """Parameters without ZeRO's padding; those under keys that `placements` lacks stay."""
    return map_placed(lambda p, x: p.unpad_shards(x), params, placements)


def specs(placements: Any, *, sharded: bool) -> Any:
    """A tree of PartitionSpecs; they include ZeRO's axes if `sharded`."""
    return jax.tree.map(lambda p: p.spec(sharded=sharded), placements)


def shardings(mesh: Mesh, placements: Any, *, sharded: bool) -> Any:
    """`specs` as NamedShardings."""
    return jax.tree.map(lambda p: NamedSharding(mesh, p.spec(sharded=sharded)), placements)


def drop_layer_dim(placements: Any) -> Any:
    """Placements of one layer of stacked parameters."""

    def drop(p: Placement) -> Placement:
        dims = {axis: dim - 1 for axis, dim in p.dims.items() if axis != PP}
        return Placement(shape=p.shape[1:], dims=dims, degrees={**p.degrees, PP: 1}, shards=p.shards)

    return jax.tree.map(drop, placements)


def _resize(x: Any, dim: int, size: int) -> Any:
    """x with the first `size` entries of a dim, or padded to it with zeros (NumPy only)."""
    if x.shape[dim] >= size:
        return x if x.shape[dim] == size else x[(slice(None),) * dim + (slice(size),)]
    return np.pad(x, [(0, size - x.shape[i] if i == dim else 0) for i in range(x.ndim)])


def split_dim(x: Any, dim: int, *sizes: int) -> Any:
    """(.., n, ..) -> (.., *sizes, ..). The mesh axes that split n split the first of the sizes."""
    shape = (*x.shape[:dim], *sizes, *x.shape[dim + 1 :])
    return _reshape(x, shape, lambda axes: (*axes[: dim + 1], *(None,) * (len(sizes) - 1), *axes[dim + 1 :]))


def merge_dims(x: Any, dim: int) -> Any:
    """(.., n, m, ..) -> (.., n m, ..). The mesh axes that split n split n m."""
    shape = (*x.shape[:dim], -1, *x.shape[dim + 2 :])
    return _reshape(x, shape, lambda axes: (*axes[: dim + 1], *axes[dim + 2 :]))


def _reshape(x: Any, shape: tuple[int, ...], axes_of: Callable[[tuple], tuple]) -> Any:
    """x.reshape(shape), with these axes in an explicit type: with a dim of size 1 JAX cannot derive them."""
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return x.reshape(shape)
    return x.reshape(shape, out_sharding=sharding.spec.update(partitions=axes_of(sharding.spec.partitions)))
