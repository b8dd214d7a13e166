"""Placement of every leaf: mesh axes by dim, padded so that each device holds an equal part.

Both engines store the same arrays in the same places; they differ in who moves them. `pp` takes the dim of
the layers, which are stored in the order of the devices that have them. `tp` takes the dim whose logical
axis its table names. `dp_shard` then takes, of all dims but the layers (a scan walks along
them, and a layer must be gathered by itself), the first that it divides, one that tp left alone if there
is such a one: its parts lie in memory one after the other, and a gather or a scatter has less to transpose.
If it divides none, the largest is padded with zeros. A padded entry has no gradient, so that it stays zero:
it costs bytes, at most one row less than there are devices, and changes no number.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from compare.spec.axes import DP_SHARD, LAYER, PP, TP

ORDER = (PP, TP, DP_SHARD)
"""Mesh axes that split leaves, from the outermost part to the innermost."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One leaf's.

    Attributes:
        shape: the true shape, over all devices.
        dims: mesh axis -> the dim that it splits. Where dp_shard and tp split the same one, dp_shard splits
            within tp's parts.
        degrees: mesh axis -> the devices along it; pp's divides the layers.
        chunks: the stages that a device of pp has: rank, rank + pp, rank + 2 pp and so on.
    """

    shape: tuple[int, ...]
    dims: Mapping[str, int]
    degrees: Mapping[str, int]
    chunks: int = 1

    def spec(self, *, sharded: bool) -> P:
        """The leaf's PartitionSpec; without dp_shard unless `sharded`."""
        axes_of: list[list[str]] = [[] for _ in self.shape]
        for axis in ORDER:
            if axis in self.dims and (sharded or axis != DP_SHARD):
                axes_of[self.dims[axis]].append(axis)
        return P(*(tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in axes_of))

    def part(self, dim: int, *, sharded: bool) -> int:
        """Size of a dim on one device, padding for tp included; for dp_shard, too, if `sharded`."""
        size = self.shape[dim]
        for axis in ORDER:
            if sharded or axis != DP_SHARD:
                size = -(-size // self._along(axis, dim))
        return size

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape over all devices, padding included."""
        return tuple(
            size if dim == self.dims.get(PP) else self._along(TP, dim) * self._stored_part(dim)
            for dim, size in enumerate(self.shape)
        )

    def true_range(self, dim: int, start: int, stop: int) -> tuple[int, int]:
        """A range of a stored dim, within one part of tp, as a range of the true array; not for pp's dim.

        It is shorter by the padding, which lies at the end: perhaps empty.
        """
        stored, true = self._stored_part(dim), self.part(dim, sharded=False)
        part = start // stored if stored else 0
        first, last = (
            min(part * true + min(entry - part * stored, true), self.shape[dim]) for entry in (start, stop)
        )
        return first, last

    def stored_layers(self) -> list[int]:
        """The layer at each place of the leading dim as stored, of a leaf that stacks layers."""
        return self._reordered(np.arange(self.shape[0]), self.chunks, self.degrees[PP]).tolist()

    def pad(self, x: np.ndarray) -> np.ndarray:
        """The true array, `shape`, in `stored_shape`: layers in the order of devices, short parts padded."""
        x = self._reordered(x, self.chunks, self.degrees[PP])
        if (dim := self.dims.get(TP)) is not None:
            x = _pad(x, dim, self.degrees[TP] * self.part(dim, sharded=False))
        if (dim := self.dims.get(DP_SHARD)) is not None:
            size = self.degrees[DP_SHARD] * self.part(dim, sharded=True)
            x = _joined(_pad(self._tp_parts(x, dim), dim + 1, size), dim)
        return x

    def unpad_shards(self, x: Any) -> Any:
        """An array of `stored_shape` (NumPy or JAX) without the padding of dp_shard; that of tp stays."""
        dim = self.dims.get(DP_SHARD)
        if dim is None:
            return x
        size = self.part(dim, sharded=False)
        if x.shape[dim] == size * self._along(TP, dim):
            return x
        return _joined(_head(self._tp_parts(x, dim), dim + 1, size), dim)

    def unpad(self, x: Any) -> Any:
        """The true array, `shape`, of one of `stored_shape`: the inverse of `pad`."""
        x = self._reordered(self.unpad_shards(x), self.degrees[PP], self.chunks)
        dim = self.dims.get(TP)
        return x if dim is None else _head(x, dim, self.shape[dim])

    def _along(self, axis: str, dim: int) -> int:
        """Number of parts into which a mesh axis cuts a dim: 1 if it splits another one, or none."""
        return self.degrees[axis] if self.dims.get(axis) == dim else 1

    def _stored_part(self, dim: int) -> int:
        """Size of a part of tp as it is stored, over all of dp_shard."""
        return self._along(DP_SHARD, dim) * self.part(dim, sharded=True)

    def _reordered(self, x: Any, outer: int, inner: int) -> Any:
        """Layers in the order (outer, inner, layers of a stage) -> (inner, outer, layers of a stage)."""
        dim = self.dims.get(PP)
        if dim is None or self.chunks == 1:
            return x
        before, after = x.shape[:dim], x.shape[dim + 1 :]
        x = x.reshape(*before, outer, inner, -1, *after)
        return x.swapaxes(dim, dim + 1).reshape(*before, -1, *after)

    def _tp_parts(self, x: Any, dim: int) -> Any:
        """Split tp's parts off dp_shard's dim: (..., n, ...) -> (..., tp, n/tp, ...); tp is 1 elsewhere.

        Always one dim more, at `dim`, so that the part itself is at dim + 1.
        """
        parts = self._along(TP, dim)
        return x.reshape(*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :])


def place(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    *,
    split: Mapping[str, str],
    degrees: Mapping[str, int],
    chunks: int = 1,
) -> Placement:
    """The placement of one leaf.

    Args:
        shape: its true shape.
        axes: a logical axis for each dim; `LAYER` for a dim of stacked layers.
        split: logical axis -> mesh axis, tensor parallelism's table.
        degrees: mesh axis -> the devices along it; 1 where one is missing.
        chunks: the stages on each device of pp.
    """
    degrees = {axis: degrees.get(axis, 1) for axis in ORDER}
    dims: dict[str, int] = {}
    if degrees[PP] > 1 and LAYER in axes:
        dims[PP] = axes.index(LAYER)
    if degrees[TP] > 1 and (named := [dim for dim, axis in enumerate(axes) if split.get(axis) == TP]):
        dims[TP] = named[0]
    candidates = [dim for dim, axis in enumerate(axes) if axis != LAYER]
    placement = Placement(shape=shape, dims=dims, degrees=degrees, chunks=chunks)
    if degrees[DP_SHARD] == 1 or not candidates or not math.prod(shape):
        return placement

    def preference(dim: int) -> tuple[bool, bool, int]:
        size, is_split = -(-shape[dim] // placement._along(TP, dim)), dim == dims.get(TP)
        divides = size % degrees[DP_SHARD] == 0
        return divides, not is_split, -dim if divides else size

    return replace(placement, dims={**dims, DP_SHARD: max(candidates, key=preference)})


def map_alike(f: Callable[[list[Any], tuple[str, ...]], list[Any]], placements: Any, tree: Any) -> Any:
    """Apply `f` to the leaves that are split over the same mesh axes together: to a list, and these axes."""
    leaves, structure = jax.tree.flatten(tree)
    alike: dict[tuple[str, ...], list[int]] = {}
    for i, p in enumerate(jax.tree.leaves(placements)):
        alike.setdefault(split_axes(p), []).append(i)
    for axes, at in alike.items():
        for i, leaf in zip(at, f([leaves[i] for i in at], axes), strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def map_repeated(f: Callable[[Any], Any], axis: str, placements: Any, tree: Any) -> Any:
    """Apply `f` to the leaves that are repeated along a mesh axis; those that are split over it stay."""
    return jax.tree.map(lambda p, x: x if axis in split_axes(p) else f(x), placements, tree)


def split_axes(p: Placement) -> tuple[str, ...]:
    """The mesh axes whose devices hold different parts of a leaf; along the others it is repeated."""
    return tuple(axis for axis in (PP, DP_SHARD, TP) if axis in p.dims)


def specs(placements: Any, *, sharded: bool) -> Any:
    """A tree of PartitionSpecs for a tree of placements."""
    return jax.tree.map(lambda p: p.spec(sharded=sharded), placements)


def one_layer(placements: Any) -> Any:
    """The placements of one layer of stacked leaves: the leading dim taken off."""

    def without_layer(p: Placement) -> Placement:
        dims = {axis: dim - 1 for axis, dim in p.dims.items() if axis != PP}
        return Placement(shape=p.shape[1:], dims=dims, degrees={**p.degrees, PP: 1})

    return jax.tree.map(without_layer, placements)


def _pad(x: np.ndarray, dim: int, size: int) -> np.ndarray:
    widths = [(0, size - x.shape[i] if i == dim else 0) for i in range(x.ndim)]
    return np.pad(x, widths) if size > x.shape[dim] else x


def _head(x: Any, dim: int, size: int) -> Any:
    return x if x.shape[dim] == size else x[(slice(None),) * dim + (slice(size),)]


def _joined(x: Any, dim: int) -> Any:
    """Join a dim with the one after it: the inverse of splitting tp's parts off."""
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
