"""A tensor from the cuts of its shards: each element is in one of them, and copies agree to the bit."""

import math
from collections.abc import Iterable

import numpy as np

from compare.numerics.shards import Shard, cut


def assemble(shape: tuple[int, ...], parts: Iterable[tuple[Shard, np.ndarray]]) -> np.ndarray:
    """The full tensor from what `cut` gave for its shards, in any order; copies may be among them."""
    parts = list(parts)
    assert parts, "there are no shards"
    (first, array), *_ = parts
    size = math.prod(shape)
    numbers, tensor, seen = np.arange(size).reshape(shape), np.empty(size, array.dtype), np.zeros(size, bool)
    for shard, held in parts:
        assert shard.name == first.name
        assert (held.shape, held.dtype) == (shard.held_shape, array.dtype), shard
        places = cut(numbers, shard).reshape(-1)
        known, flat = seen[places], held.reshape(-1)
        assert tensor[places][known].tobytes() == flat[known].tobytes(), f"{shard} differs from another shard"
        tensor[places], seen[places] = flat, True
    assert seen.all(), f"{first.name}: elements are in no shard"
    return tensor.reshape(shape)
