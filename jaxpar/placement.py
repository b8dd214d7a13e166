"""Placement of every leaf: mesh axes by dim, padded so that each device has an equal part.

All engines store the same arrays in the same places; they differ in who moves them. The table of axes
(`compare.spec.axes`) names the dim that pp and tp split; the layers of pp are stored in the order of the
devices that have them. ZeRO's axes, dp_shard and ep, take the first dim that they divide, preferably one
that tp left alone: its parts then lie in memory one after the other. They never take the layers: a scan walks
along them. If they divide no dim, the largest is padded with zeros, which have no gradient and so stay zero.
Experts are split by ep as by the table, and ZeRO has dp_shard alone for them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from compare.spec.axes import LAYER, PP, SHARDS, SPLIT
from compare.spec.experiment import Experiment, Layout
from jaxpar.weights import logical_axes, parameter_shapes


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One leaf's, of this true shape over all devices.

    Attributes:
        dims: mesh axis -> the dim that it splits. Those of ZeRO are last: they split another axis's parts.
        shards: ZeRO's mesh axes, which split one dim together; none if they leave the leaf alone.
        degrees: mesh axis -> the devices along it.
        chunks: the stages that a device of pp has: rank, rank + pp, rank + 2 pp and so on.
    """

    shape: tuple[int, ...]
    dims: Mapping[str, int]
    degrees: Mapping[str, int]
    chunks: int = 1
    shards: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes whose devices have different parts; along the others the leaf is repeated."""
        return tuple(self.dims)

    @property
    def shard_dim(self) -> int | None:
        """The dim that ZeRO splits."""
        return self.dims[self.shards[0]] if self.shards else None

    def spec(self, *, sharded: bool) -> P:
        """The leaf's PartitionSpec; without ZeRO's axes unless `sharded`."""
        axes = [
            tuple(
                axis for axis, at in self.dims.items() if at == dim and (sharded or axis not in self.shards)
            )
            for dim in range(len(self.shape))
        ]
        return P(*(names if len(names) > 1 else names[0] if names else None for names in axes))

    def parts(self, dim: int) -> tuple[int, int, int]:
        """Parts of a dim before ZeRO splits it; true size of each; and its size as stored."""
        others = (a for a, at in self.dims.items() if at == dim and a not in self.shards)
        count = math.prod(self.degrees[a] for a in others)
        shards = math.prod(self.degrees[a] for a in self.shards) if self.shard_dim == dim else 1
        size = -(-self.shape[dim] // count)
        return count, size, -(-size // shards) * shards

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape over all devices, padding included."""
        return tuple(count * stored for count, _, stored in map(self.parts, range(len(self.shape))))

    def true_range(self, dim: int, start: int, stop: int) -> tuple[int, int]:
        """A range of a stored dim, within one part, as a range of the true array; perhaps empty.

        Padding lies at the end of each part. Not for the dim of the layers, which are reordered.
        """
        _, size, stored = self.parts(dim)
        part = start // stored if stored else 0
        first, last = (part * size + min(entry - part * stored, size) for entry in (start, stop))
        return min(first, self.shape[dim]), min(last, self.shape[dim])

    def stored_layers(self) -> list[int]:
        """The layer at each place of the leading dim as stored, of a leaf that stacks layers."""
        return self._reordered(np.arange(self.shape[0]), self.chunks, self.degrees[PP]).tolist()

    def pad(self, x: np.ndarray) -> np.ndarray:
        """The true array, `shape`, in `stored_shape`."""
        x = self._reordered(x, self.chunks, self.degrees[PP])
        for dim in set(self.dims.values()):
            count, size, stored = self.parts(dim)
            x = _resized(x, dim, count * size)
            x = joined(_resized(cut(x, dim, count, -1), dim + 1, stored), dim)
        return x

    def unpad_shards(self, x: Any) -> Any:
        """An array of `stored_shape` (NumPy or JAX) without the padding of ZeRO's shards."""
        dim = self.shard_dim
        if dim is None:
            return x
        count, size, stored = self.parts(dim)
        return x if size == stored else joined(_resized(cut(x, dim, count, -1), dim + 1, size), dim)

    def unpad(self, x: Any) -> Any:
        """The inverse of `pad`."""
        x = self._reordered(self.unpad_shards(x), self.degrees[PP], self.chunks)
        for dim, size in enumerate(self.shape):
            x = _resized(x, dim, size)
        return x

    def _reordered(self, x: Any, outer: int, inner: int) -> Any:
        """Layers in the order (outer, inner, layers of a stage) -> (inner, outer, layers of a stage)."""
        dim = self.dims.get(PP)
        if dim is None or self.chunks == 1:
            return x
        before, after = x.shape[:dim], x.shape[dim + 1 :]
        x = x.reshape(*before, outer, inner, -1, *after)
        return x.swapaxes(dim, dim + 1).reshape(*before, -1, *after)


def place(shape: tuple[int, ...], axes: tuple[str, ...], layout: Layout) -> Placement:
    """The placement of one leaf of this true shape, with a logical axis for each dim."""
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
        _, size, _ = placement.parts(dim)
        divides = size % count == 0
        return divides, dim not in dims.values(), -dim if divides else size

    dim = max(candidates, key=preference)
    return replace(placement, dims={**dims, **dict.fromkeys(shards, dim)}, shards=shards)


def place_parameters(experiment: Experiment) -> Any:
    """A tree with the `Placement` of each parameter."""
    shapes, axes = parameter_shapes(experiment), logical_axes(experiment.model)
    return jax.tree.map(lambda leaf, axes: place(leaf.shape, axes, experiment.layout), shapes, axes)


def map_repeated(f: Callable[[Any], Any], axis: str, placements: Any, tree: Any) -> Any:
    """Apply `f` to the leaves that are repeated along a mesh axis; those that are split over it stay."""
    return jax.tree.map(lambda p, x: x if axis in p.dims else f(x), placements, tree)


def specs(placements: Any, *, sharded: bool) -> Any:
    """A tree of PartitionSpecs; leaves are split over ZeRO's axes only if `sharded`."""
    return jax.tree.map(lambda p: p.spec(sharded=sharded), placements)


def shardings(mesh: Mesh, placements: Any, *, sharded: bool) -> Any:
    """The same as NamedShardings."""
    return jax.tree.map(lambda p: NamedSharding(mesh, p.spec(sharded=sharded)), placements)


def unpad(params: Any, placements: Any) -> Any:
    """Parameters without what only makes ZeRO's shards equal in size."""
    return jax.tree.map(lambda p, x: p.unpad_shards(x), placements, params)


def one_layer(placements: Any) -> Any:
    """The placements of one layer of stacked leaves: the leading dim taken off."""

    def without_layer(p: Placement) -> Placement:
        dims = {axis: dim - 1 for axis, dim in p.dims.items() if axis != PP}
        return Placement(shape=p.shape[1:], dims=dims, degrees={**p.degrees, PP: 1}, shards=p.shards)

    return jax.tree.map(without_layer, placements)


def _resized(x: Any, dim: int, size: int) -> Any:
    """x with this size of a dim: cut off, or padded with zeros (NumPy alone)."""
    if x.shape[dim] >= size:
        return x if x.shape[dim] == size else x[(slice(None),) * dim + (slice(size),)]
    return np.pad(x, [(0, size - x.shape[i] if i == dim else 0) for i in range(x.ndim)])


def cut(x: Any, dim: int, *sizes: int) -> Any:
    """(.., n, ..) -> (.., *sizes, ..) at `dim`; what splits n splits the first of them."""
    shape = (*x.shape[:dim], *sizes, *x.shape[dim + 1 :])
    return _typed(x, shape, lambda axes: (*axes[: dim + 1], *(None,) * (len(sizes) - 1), *axes[dim + 1 :]))


def joined(x: Any, dim: int) -> Any:
    """The inverse of `cut` in two."""
    shape = (*x.shape[:dim], -1, *x.shape[dim + 2 :])
    return _typed(x, shape, lambda axes: (*axes[: dim + 1], *axes[dim + 2 :]))


def _typed(x: Any, shape: tuple[int, ...], axes_of: Callable[[tuple], tuple]) -> Any:
    """x in another shape; if it has a type, with these axes: beside a dim of 1 JAX finds none by itself."""
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return x.reshape(shape)
    return x.reshape(shape, out_sharding=sharding.spec.update(partitions=axes_of(sharding.spec.partitions)))
