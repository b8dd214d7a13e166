"""Boxes: contiguous blocks of tensors, for files and for the overlap between the shards of two layouts.

A range of a matrix's elements is up to three boxes: the end of a row, whole rows, and the beginning of a row.
`Weights` reads a tensor, or boxes of a tensor, on access.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod

import numpy as np
from msgspec import Struct

from compare.numerics.shards import Shard

Limits = list[tuple[int, int]]
"""Begin and end of a box, for each dim."""


class Box(Struct, frozen=True):
    """A contiguous block of a tensor, by ranges of its dims."""

    offset: tuple[int, ...]
    """First index, for each dim of the tensor."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of its elements."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices of the tensor that select this box."""
        return tuple(slice(o, o + size) for o, size in zip(self.offset, self.shape, strict=True))

    def within(self, other: "Box") -> tuple[slice, ...]:
        """Slices that select this box in an array of another box, which contains it."""
        return tuple(
            slice(own - start, own - start + size)
            for own, start, size in zip(self.offset, other.offset, self.shape, strict=True)
        )

    def overlap(self, other: "Box") -> "Box | None":
        """Intersection of two boxes of a tensor; None if it is empty."""
        pairs = zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        limits = [(max(a, b), min(a + m, b + n)) for a, m, b, n in pairs]
        return _box(limits) if all(start < stop for start, stop in limits) else None


def full_box(shape: tuple[int, ...]) -> Box:
    """The box of a full tensor of this shape."""
    return Box((0,) * len(shape), shape)


def to_boxes(shard: Shard, held: np.ndarray) -> Iterator[tuple[Box, np.ndarray]]:
    """Cut a device's shard, of shape `shard.local_shape`, into boxes with values; none if it is empty."""
    for box, part, shape, back in _boxes(shard):
        yield box, held if part is None else held[part].reshape(shape).transpose(back)


def from_boxes(
    shard: Shard, read: Callable[[Sequence[Box]], Sequence[np.ndarray]], dtype: np.dtype
) -> np.ndarray:
    """Join a shard, of shape `shard.local_shape`, from its boxes: the inverse of `to_boxes`."""
    boxes = list(_boxes(shard))
    arrays = read([box for box, *_ in boxes])
    if shard.elements is None and boxes:
        return arrays[0]
    held = np.zeros(shard.local_shape, dtype)
    for (_, part, _, back), array in zip(boxes, arrays, strict=True):
        held[part] = array.transpose(np.argsort(back)).reshape(-1)
    return held


def _boxes(shard: Shard) -> Iterator[tuple[Box, slice | None, tuple[int, ...], tuple[int, ...]]]:
    """Boxes of a shard; for a range also its slice of the flat shard, its shape, and its dims in canonical
    order."""
    if shard.elements is None:
        if prod(shard.shape):
            yield Box(shard.offset, shard.shape), None, shard.shape, ()
        return
    order = shard.dim_order or tuple(range(len(shard.shape)))
    back = tuple(int(dim) for dim in np.argsort(order))
    first, stop = shard.elements
    for start, limits in _runs([shard.shape[dim] for dim in order], first, stop):
        shape = tuple(b - a for a, b in limits)
        placed = [limits[dim] for dim in back]
        box = _box([(o + a, o + b) for o, (a, b) in zip(shard.offset, placed, strict=True)])
        yield box, slice(start - first, start - first + box.size), shape, back


def _runs(sizes: list[int], start: int, stop: int, base: int = 0) -> Iterator[tuple[int, Limits]]:
    """Boxes of a range of elements, counted row by row, in order, each with the number of its first
    element."""
    if start >= stop:
        return
    if len(sizes) <= 1:
        yield base + start, [(start, stop)][: len(sizes)]
        return
    inner = prod(sizes[1:])
    row, last = start // inner, stop // inner
    if start % inner or row == last:
        end = min(stop, (row + 1) * inner)
        yield from _in_row(sizes, row, start, end, base)
        row += 1
    if row < last:
        yield base + row * inner, [(row, last), *((0, size) for size in sizes[1:])]
    if row <= last and stop % inner:
        yield from _in_row(sizes, last, last * inner, stop, base)


def _in_row(sizes: list[int], row: int, start: int, stop: int, base: int) -> Iterator[tuple[int, Limits]]:
    before = row * prod(sizes[1:])
    for number, limits in _runs(sizes[1:], start - before, stop - before, base + before):
        yield number, [(row, row + 1), *limits]


def _box(limits: Limits) -> Box:
    return Box(tuple(start for start, _ in limits), tuple(stop - start for start, stop in limits))


class Weights(Mapping[str, np.ndarray]):
    """Full tensors by canonical name, which `read` reads on each access.

    No tensor is kept, so a process never needs memory for the whole model.
    """

    def __init__(self, names: Iterable[str], read: Callable[[str], np.ndarray]):
        self._names, self._read = list(names), read

    def __getitem__(self, name: str) -> np.ndarray:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def boxes(self, name: str, boxes: Sequence[Box]) -> list[np.ndarray]:
        """Read boxes of a tensor. Subclasses avoid reading the full tensor."""
        full = self[name]
        return [full[box.slices] for box in boxes]
