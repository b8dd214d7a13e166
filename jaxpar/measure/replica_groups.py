"""Groups of devices in a collective, read from its HLO in any of XLA's spellings."""

import math
import re
from collections.abc import Mapping

import numpy as np

_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"replica_groups=@?mesh\[([^\]]*)\]([^{]*)\{([^}]*)\}")
_DEVICE_IDS = re.compile(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)|device_ids=\(([\d,]+)\)")


def replica_groups(text: str, axis_sizes: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
    """The groups of a collective: {{0,1},{2,3}}, [2,2]<=[4], or mesh['x'=2,'y'=2] {'x'}.

    Args:
        text: the instruction.
        axis_sizes: mesh axes with their sizes, in the order of the mesh.

    Returns:
        Positions of devices in the mesh; of a permute, (source, target) pairs.

    Raises:
        ValueError: another spelling.
    """
    everyone = math.prod(axis_sizes.values())
    if match := _LISTED.search(text):
        groups = re.findall(r"\{([\d,]+)\}", match[1])
        return tuple(tuple(map(int, group.split(","))) for group in groups) or (tuple(range(everyone)),)
    if match := _IOTA.search(text):
        shape, source = (tuple(map(int, match[i].split(","))) for i in (1, 2))
        ids = _transposed(source, match[3])
        return tuple(tuple(int(i) for i in row) for row in ids.reshape(shape))
    if match := _NAMED.search(text):
        sizes = {name: int(size) for name, size in re.findall(r"'?([\w]+)'?=(\d+)", match[1])}
        return groups_along(tuple(re.findall(r"\w+", match[3])), sizes, _device_ids(match[2]))
    raise ValueError(f"a collective whose replica groups cannot be read: {text[:200]}")


def _device_ids(text: str) -> np.ndarray | None:
    """The devices of a named mesh that XLA has ordered anew: ([2,2]T(1,0)) or (0,2,1,3)."""
    match = _DEVICE_IDS.search(text)
    if not match:
        return None
    if match[3]:
        return np.array([int(i) for i in match[3].split(",")])
    return _transposed(tuple(map(int, match[1].split(","))), match[2])


def _transposed(shape: tuple[int, ...], dims: str | None) -> np.ndarray:
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose([int(dim) for dim in dims.split(",")]) if dims else ids


def groups_along(
    axes: tuple[str, ...], axis_sizes: Mapping[str, int], ids: np.ndarray | None = None
) -> tuple[tuple[int, ...], ...]:
    """Groups of devices that differ only along `axes`.

    Args:
        axes: of the mesh.
        axis_sizes: all axes with their sizes, in the order of the mesh.
        ids: numbers of the devices, one for each position of the mesh; None: in order.
    """
    ids = np.arange(math.prod(axis_sizes.values())) if ids is None else ids
    ids = ids.reshape(tuple(axis_sizes.values()))
    last = [list(axis_sizes).index(axis) for axis in axes]
    ids = np.moveaxis(ids, last, range(-len(axes), 0))
    size = math.prod(axis_sizes[axis] for axis in axes)
    return tuple(tuple(int(i) for i in row) for row in ids.reshape(-1, size))
