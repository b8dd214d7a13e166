"""The axes of the mesh: their names and order, and what each splits.

    axis           its devices split                             rows of a batch     positions
    dp_replicate   nothing: each has a replica                   its own             all
    pp             the layers                                    the same            all
    dp_shard       a replica's state, by the ZeRO stage          its own             all
    ep             experts; other state like dp_shard            its own             all
    cp             nothing: each has a replica                   the same            its own
    tp             heads, MLP and vocabulary of each layer       the same            all

`layout.ep` splits the ranks of `layout.dp_shard`. In the mesh the axis dp_shard has dp_shard / ep devices.
ZeRO splits experts over the axis dp_shard, and all other state over dp_shard and ep together.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct

PP, DP_REPLICATE, DP_SHARD, TP, EP, CP = "pp", "dp_replicate", "dp_shard", "tp", "ep", "cp"
LAYER = "layer"
"""Logical axis of the stacked layers."""


class MeshAxis(Struct, frozen=True, kw_only=True):
    """One axis of the mesh."""

    name: str
    """Name of its degree in `Layout`."""
    splits: tuple[str, ...] = ()
    """Logical axes of parameters that it splits."""
    splits_batch: bool = False
    """Whether its devices have different rows of a batch."""
    splits_sequence: bool = False
    """Whether its devices have different positions of a sequence."""


# Devices are numbered host after host. tp sends most, so it is innermost: its devices are neighbours.
# dp_replicate sends once a step, so it is outermost: with several hosts it is the first axis to cross hosts.
MESH_AXES = (
    MeshAxis(name=DP_REPLICATE, splits_batch=True),
    MeshAxis(name=PP, splits=(LAYER,)),
    MeshAxis(name=DP_SHARD, splits_batch=True),
    MeshAxis(name=EP, splits=("expert",), splits_batch=True),
    MeshAxis(name=CP, splits_sequence=True),
    MeshAxis(name=TP, splits=("heads", "mlp", "vocab")),
)
"""All axes, outermost first."""

AXES = tuple(axis.name for axis in MESH_AXES)
"""Names of the axes, outermost first."""

ROWS = tuple(axis.name for axis in MESH_AXES if axis.splits_batch)
"""Axes whose devices have different rows, outermost first."""

SEQUENCE = tuple(axis.name for axis in MESH_AXES if axis.splits_sequence)
"""Axes whose devices have different positions."""

DATA = tuple(axis.name for axis in MESH_AXES if axis.splits_batch or axis.splits_sequence)
"""Axes whose devices have different data, outermost first. Loss and gradients are means over them."""

SHARDS = (DP_SHARD, EP)
"""Axes over which ZeRO splits all state except experts: `layout.dp_shard` devices."""

REPLICAS = tuple(name for name in DATA if name not in SHARDS)
"""Axes of data over which ZeRO splits nothing. Shards are summed over them."""

SPLIT = {logical: axis.name for axis in MESH_AXES for logical in axis.splits}
"""Logical axis of a parameter -> the mesh axis that splits it."""


SHARDED_FROM = {"optimizer": 1, "gradients": 2, "parameters": 3}
"""State that dp_shard splits -> the ZeRO stage from which it does."""


def joined(*names: str) -> str:
    """The name of several axes together, as a collective over all of them has it."""
    return "+".join(names)


def parts_of(name: str) -> list[str]:
    """The axes of a joined name."""
    return name.split("+")


def joined_of(names: Iterable[str], degrees: Mapping[str, int]) -> str:
    """The joined name of the axes with more than one device; '' for none."""
    return joined(*(name for name in names if degrees[name] > 1))
