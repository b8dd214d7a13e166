"""A tensor put together from its shards: what every description of shards is held to."""

from collections.abc import Iterable

import numpy as np

from compare.numerics.shards import Shard, ShardError, box_of, cut


def assemble(shape: tuple[int, ...], parts: Iterable[tuple[Shard, np.ndarray]]) -> np.ndarray:
    """The whole tensor from what devices hold of it: the inverse of `cut`.

    Args:
        shape: the tensor's.
        parts: shards of this tensor and what `cut` gives for them, in any order; copies may be among them.

    Raises:
        ShardError: an element is in no part, or differs between two; a part has another shape or dtype than
            it should, or reaches beyond the tensor; there are no parts, or those of several tensors.
    """
    parts = list(parts)
    if not parts:
        raise ShardError(f"there are no shards for a tensor of shape {shape}")
    (first, array), *_ = parts
    whole, seen = np.empty(shape, array.dtype), np.zeros(shape, bool)
    for shard, held in parts:
        where = f"{shard.name} on device {shard.device}"
        if shard.name != first.name:
            raise ShardError(f"{where} is no shard of {first.name}")
        if (held.shape, held.dtype) != (shard.held_shape, array.dtype):
            raise ShardError(
                f"{where} is {held.shape} {held.dtype}, and should be {shard.held_shape} {array.dtype}"
            )
        known = cut(seen, shard)
        if cut(whole, shard)[known].tobytes() != held[known].tobytes():  # bits: copies of a NaN agree
            raise ShardError(f"{where} differs from another shard that has the same elements")
        _put(whole, shard, held)
        _put(seen, shard, np.ones(held.shape, bool))
    if not seen.all():
        hole = tuple(int(i) for i in np.argwhere(~seen)[0])
        raise ShardError(
            f"{first.name}: {np.count_nonzero(~seen)} of {seen.size} elements are in no shard, such as {hole}"
        )
    return whole


def _put(tensor: np.ndarray, shard: Shard, held: np.ndarray) -> None:
    """Write what a device holds into the tensor."""
    box = box_of(tensor, shard)
    if shard.elements is None:
        box[...] = held
    else:
        box.flat[slice(*shard.elements)] = held
