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
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from compare.spec.axes import DP_SHARD, LAYER, PP, TP


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One leaf's.

    Attributes:
        shape: the true shape, over all devices.
        tp_dim: the dim that tp splits, or None.
        shard_dim: the dim that dp_shard splits, within a tp part if it is the same one; or None.
        pp_dim: the dim of the layers, if pp splits it.
        tp: the degree of tp.
        shards: the degree of dp_shard.
        pp: the degree of pp, which divides the layers.
        chunks: the stages that a device of pp has: rank, rank + pp, rank + 2 pp and so on.
    """

    shape: tuple[int, ...]
    tp_dim: int | None = None
    shard_dim: int | None = None
    pp_dim: int | None = None
    tp: int = 1
    shards: int = 1
    pp: int = 1
    chunks: int = 1

    def spec(self, *, sharded: bool) -> P:
        """The leaf's PartitionSpec; without dp_shard unless `sharded`."""
        by_dim: list[Any] = [None] * len(self.shape)
        if self.pp_dim is not None:
            by_dim[self.pp_dim] = PP
        if self.tp_dim is not None:
            by_dim[self.tp_dim] = TP
        if sharded and self.shard_dim is not None:
            by_dim[self.shard_dim] = DP_SHARD if self.shard_dim != self.tp_dim else (TP, DP_SHARD)
        return P(*by_dim)

    def part(self, dim: int, *, sharded: bool) -> int:
        """Size of a dim on one device, padding for tp included; for dp_shard, too, if `sharded`."""
        size = self.shape[dim] // (self.pp if dim == self.pp_dim else 1)
        size = -(-size // self.tp) if dim == self.tp_dim else size
        return -(-size // self.shards) if sharded and dim == self.shard_dim else size

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape over all devices, padding included."""
        return tuple(
            size if dim == self.pp_dim else (self.tp if dim == self.tp_dim else 1) * self._stored_part(dim)
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
        return self._reordered(np.arange(self.shape[0]), self.chunks, self.pp).tolist()

    def pad(self, x: np.ndarray) -> np.ndarray:
        """The true array as it is stored: layers by the device that has them, zeros where a part is short."""
        x = self._reordered(x, self.chunks, self.pp)
        if self.tp_dim is not None:
            x = _pad(x, self.tp_dim, self.tp * self.part(self.tp_dim, sharded=False))
        if self.shard_dim is not None:
            parts = self._tp_parts(x)
            size = self.shards * self.part(self.shard_dim, sharded=True)
            x = self._joined(_pad(parts, self.shard_dim + 1, size))
        return x

    def unpad_shards(self, x: Any) -> Any:
        """A whole array (NumPy or JAX) without dp_shard's padding; tp's stays."""
        if self.shard_dim is None:
            return x
        size = self.part(self.shard_dim, sharded=False)
        if x.shape[self.shard_dim] == size * (self.tp if self.shard_dim == self.tp_dim else 1):
            return x
        return self._joined(_head(self._tp_parts(x), self.shard_dim + 1, size))

    def unpad(self, x: Any) -> Any:
        """The true array again: the inverse of `pad`."""
        x = self._reordered(self.unpad_shards(x), self.pp, self.chunks)
        return x if self.tp_dim is None else _head(x, self.tp_dim, self.shape[self.tp_dim])

    def _stored_part(self, dim: int) -> int:
        """Size of a part of tp as it is stored, over all of dp_shard."""
        shards = self.shards if dim == self.shard_dim else 1
        return shards * self.part(dim, sharded=True)

    def _reordered(self, x: Any, outer: int, inner: int) -> Any:
        """Layers in the order (outer, inner, layers of a stage) -> (inner, outer, layers of a stage)."""
        if self.pp_dim is None or self.chunks == 1:
            return x
        before, after = x.shape[: self.pp_dim], x.shape[self.pp_dim + 1 :]
        x = x.reshape(*before, outer, inner, -1, *after)
        return x.swapaxes(self.pp_dim, self.pp_dim + 1).reshape(*before, -1, *after)

    def _tp_parts(self, x: Any) -> Any:
        """Split tp's dim off, if dp_shard splits within its parts: (..., n, ...) -> (..., tp, n/tp, ...).

        Always one dim more, at shard_dim, so that the part itself is at shard_dim + 1.
        """
        dim, parts = self.shard_dim, self.tp if self.shard_dim == self.tp_dim else 1
        assert dim is not None
        return x.reshape(*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :])

    def _joined(self, x: Any) -> Any:
        dim = self.shard_dim
        assert dim is not None
        return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def place(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    *,
    split: Mapping[str, str],
    tp: int = 1,
    shards: int = 1,
    pp: int = 1,
    chunks: int = 1,
) -> Placement:
    """The placement of one leaf.

    Args:
        shape: its true shape.
        axes: a logical axis for each dim; `LAYER` for a dim of stacked layers.
        split: logical axis -> mesh axis, tensor parallelism's table.
        tp: the degree of tp.
        shards: the degree of dp_shard.
        pp: the degree of pp.
        chunks: the stages on each device of pp.
    """
    placement = partial(Placement, shape=shape, tp=tp, shards=shards, pp=pp, chunks=chunks)
    pp_dim = axes.index(LAYER) if pp > 1 and LAYER in axes else None
    tp_dims = [dim for dim, axis in enumerate(axes) if tp > 1 and split.get(axis) == TP]
    tp_dim = tp_dims[0] if tp_dims else None
    candidates = [dim for dim, axis in enumerate(axes) if axis != LAYER]
    if shards == 1 or not candidates or not math.prod(shape):
        return placement(tp_dim=tp_dim, pp_dim=pp_dim)

    def preference(dim: int) -> tuple[bool, bool, int]:
        size = -(-shape[dim] // tp) if dim == tp_dim else shape[dim]
        divides = size % shards == 0
        return divides, dim != tp_dim, -dim if divides else size

    shard_dim = max(candidates, key=preference)
    return placement(tp_dim=tp_dim, shard_dim=shard_dim, pp_dim=pp_dim)


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
    dims = ((PP, p.pp_dim), (DP_SHARD, p.shard_dim), (TP, p.tp_dim))
    return tuple(axis for axis, dim in dims if dim is not None)


def specs(placements: Any, *, sharded: bool) -> Any:
    """A tree of PartitionSpecs for a tree of placements."""
    return jax.tree.map(lambda p: p.spec(sharded=sharded), placements)


def one_layer(placements: Any) -> Any:
    """The placements of one layer of stacked leaves: the leading dim taken off."""

    def without_layer(p: Placement) -> Placement:
        dims = (dim if dim is None else dim - 1 for dim in (p.tp_dim, p.shard_dim))
        tp_dim, shard_dim = dims
        return Placement(shape=p.shape[1:], tp_dim=tp_dim, shard_dim=shard_dim, tp=p.tp, shards=p.shards)

    return jax.tree.map(without_layer, placements)


def _pad(x: np.ndarray, dim: int, size: int) -> np.ndarray:
    widths = [(0, size - x.shape[i] if i == dim else 0) for i in range(x.ndim)]
    return np.pad(x, widths) if size > x.shape[dim] else x


def _head(x: Any, dim: int, size: int) -> Any:
    return x if x.shape[dim] == size else x[(slice(None),) * dim + (slice(size),)]
