"""Cuts of a tensor, and the tensor from them: each element is in one of them, and copies agree to the bit."""

import math
from collections.abc import Iterable

import numpy as np

from compare.numerics.shards import Shard


def cut(tensor: np.ndarray, shard: Shard) -> np.ndarray:
    """Copy of a device's shard, `shard.local_shape`, of a full tensor."""
    ends = (start + size for start, size in zip(shard.offset, shard.shape, strict=True))
    box = tensor[(*map(slice, shard.offset, ends), ...)]  # the ellipsis keeps one without dims an array
    if shard.elements is None:
        return box.copy()
    return box.transpose(shard.dim_order or range(box.ndim)).flatten()[slice(*shard.elements)]


def assemble(shape: tuple[int, ...], parts: Iterable[tuple[Shard, np.ndarray]]) -> np.ndarray:
    """The full tensor from what `cut` gave for its shards, in any order; copies may be among them."""
    parts = list(parts)
    assert parts, "no shards given"
    (first, array), *_ = parts
    size = math.prod(shape)
    numbers, tensor, seen = np.arange(size).reshape(shape), np.empty(size, array.dtype), np.zeros(size, bool)
    for shard, held in parts:
        assert shard.name == first.name
        assert (held.shape, held.dtype) == (shard.local_shape, array.dtype), shard
        places = cut(numbers, shard).reshape(-1)
        known, flat = seen[places], held.reshape(-1)
        assert tensor[places][known].tobytes() == flat[known].tobytes(), f"{shard} differs from another shard"
        tensor[places], seen[places] = flat, True
    assert seen.all(), f"{first.name}: elements are in no shard"
    return tensor.reshape(shape)
