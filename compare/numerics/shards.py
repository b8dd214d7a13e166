"""`Shard`: one device's part of a canonical tensor, and cutting it out.

Each side describes where its weights live in these terms (`jaxpar.shards`, `torchpar.shards`), whatever
cut them:

    tensor and pipeline parallelism     a box: heads 2 and 3 of a projection, or a tensor as it is
    jax's dp_shard                      a smaller box
    torch's dp_shard                    a range of the box's elements, in the order in which torch stores them

Padding is no part of a canonical tensor: what a device holds only to fill up an equal share is not described.
All is done for one tensor at a time, so that no process needs the whole model.
"""

from collections.abc import Iterable
from hashlib import sha256

import numpy as np
from msgspec import Struct


class ShardError(ValueError):
    """Shards that do not fit a tensor, an array, or each other. The message names the tensor and device."""


class Shard(Struct, frozen=True, kw_only=True):
    """The part of one canonical tensor that one device holds.

    A device that holds nothing of a tensor has no shard of it, or an empty one if its share is all padding.

    Raises:
        ShardError: the fields contradict each other.
    """

    name: str
    """The tensor's canonical name."""
    device: int
    """Its number in the mesh, as the layout's axes count: the last axis fastest."""
    offset: tuple[int, ...]
    """First index of the box, for each dim of the tensor."""
    shape: tuple[int, ...]
    """Shape of the box."""
    elements: tuple[int, int] | None = None
    """Range of the box's elements, [first, last); None for all of them."""
    dim_order: tuple[int, ...] = ()
    """Order in which `elements` counts: the tensor's dims, the slowest first; () for row by row."""
    replica: int = 0
    """0 for one of the devices that hold this part, 1 and so on for its copies on others."""

    def __post_init__(self) -> None:
        dims = tuple(range(len(self.shape)))
        self._require(len(self.offset) == len(dims), f"offset {self.offset} and shape {self.shape}")
        self._require(min((*self.offset, *self.shape, self.replica, self.device), default=0) >= 0, "below 0")
        self._require(tuple(sorted(self.dim_order)) in ((), dims), f"dim_order {self.dim_order}")
        if self.elements is not None:
            start, stop = self.elements
            size = int(np.prod(self.shape))
            self._require(0 <= start <= stop <= size, f"elements {self.elements} of {size}")

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise ShardError(f"{self.name} on device {self.device}: {what}")

    @property
    def held_shape(self) -> tuple[int, ...]:
        """Shape of the device's shard: the box's, or (elements,) for a range of them."""
        return self.shape if self.elements is None else (self.elements[1] - self.elements[0],)


def cut(tensor: np.ndarray, shard: Shard) -> np.ndarray:
    """Copy of a device's shard, `shard.held_shape`, of a full tensor. ShardError if it reaches beyond."""
    box = _box(tensor, shard)
    return box.copy() if shard.elements is None else box.flat[slice(*shard.elements)]


def _box(tensor: np.ndarray, shard: Shard) -> np.ndarray:
    """A view of the box, its dims in the order of `elements` if it has those."""
    ends = tuple(start + size for start, size in zip(shard.offset, shard.shape, strict=True))
    if len(ends) != tensor.ndim or any(end > size for end, size in zip(ends, tensor.shape, strict=True)):
        raise ShardError(
            f"{shard.name} on device {shard.device}: {shard.shape} at {shard.offset} is not within "
            f"{tensor.shape}"
        )
    # The ellipsis keeps a tensor without dims an array.
    box = tensor[(*(slice(*limits) for limits in zip(shard.offset, ends, strict=True)), ...)]
    return box if shard.elements is None or not shard.dim_order else box.transpose(shard.dim_order)


def digests_of(held: Iterable[tuple[Shard, np.ndarray]]) -> list[tuple[str, int, str]]:
    """Of every shard: what part it is, its name first; the device; and the SHA-256 of its values."""
    return [
        (f"{x.name} {x.offset} {x.shape} {x.elements}", x.device, sha256(array.tobytes()).hexdigest())
        for x, array in held
    ]


def replicas_apart(digests: Iterable[tuple[str, int, str]]) -> str:
    """Two devices that have the same part of a tensor, and not the same values; '' if there are none."""
    first: dict[str, tuple[int, str]] = {}
    for part, device, digest in digests:
        other, expected = first.setdefault(part, (device, digest))
        if digest != expected:
            return f"another {part.partition(' ')[0]} on device {device} than on device {other}"
    return ""
