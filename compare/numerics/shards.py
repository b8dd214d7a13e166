"""`Shard`: one device's part of a canonical tensor. Replicas of a shard are compared by digest.

Both sides describe their shards so (`checkpoint.py`):

    tensor and pipeline parallelism     a box: heads 2 and 3 of a projection, or a full tensor
    jax's dp_shard                      a smaller box
    torch's dp_shard                    a range of the box's elements, in the order in which torch stores them

A shard does not include padding.
"""

from collections.abc import Iterable
from hashlib import sha256

import numpy as np
from msgspec import Struct


class Shard(Struct, frozen=True, kw_only=True):
    """The part of one canonical tensor that one device holds.

    A device that holds nothing of a tensor has no shard of it, or an empty one if its share is all padding.
    """

    name: str
    """The tensor's canonical name."""
    device: int
    """Number of the device in the mesh; the last axis varies fastest."""
    offset: tuple[int, ...]
    """First index of the box, for each dim of the tensor."""
    shape: tuple[int, ...]
    """Shape of the box."""
    elements: tuple[int, int] | None = None
    """Range of the box's elements, [first, last); None for all of them."""
    dim_order: tuple[int, ...] = ()
    """Order of the dims in which `elements` counts, the slowest first; () for row by row."""
    replica: int = 0
    """0 for the first device with this part, 1 and so on for copies on other devices."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the device's shard: the box's, or (elements,) for a range of them."""
        return self.shape if self.elements is None else (self.elements[1] - self.elements[0],)


def digests_of(held: Iterable[tuple[Shard, np.ndarray]]) -> list[tuple[str, int, str]]:
    """(description of the shard, device, SHA-256 of its values) of every shard."""
    return [
        (f"{x.name} {x.offset} {x.shape} {x.elements}", x.device, sha256(array.tobytes()).hexdigest())
        for x, array in held
    ]


def replicas_apart(digests: Iterable[tuple[str, int, str]]) -> str:
    """Two devices whose copies of a part differ; '' if all copies are equal."""
    first: dict[str, tuple[int, str]] = {}
    for part, device, digest in digests:
        other, expected = first.setdefault(part, (device, digest))
        if digest != expected:
            return f"another {part.partition(' ')[0]} on device {device} than on device {other}"
    return ""
