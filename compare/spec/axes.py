"""The axes of the mesh, declared once: their names and order, what each splits, and who shares a batch.

    axis           what its devices split                        rows of a batch
    dp_replicate   nothing: each has a replica                   its own
    pp             the layers                                    the same
    dp_shard       a replica's state, as far as ZeRO says        its own
    tp             heads, MLP and vocabulary of each layer       the same

Rows, split and means are derived from this table: a new axis is a row of it.
"""

from collections.abc import Iterable

from msgspec import Struct

PP, DP_REPLICATE, DP_SHARD, TP = "pp", "dp_replicate", "dp_shard", "tp"
LAYER = "layer"
"""The logical axis of stacked layers."""


class MeshAxis(Struct, frozen=True, kw_only=True):
    """One axis of the mesh."""

    name: str
    """As its degree is called in `Layout`."""
    splits: tuple[str, ...] = ()
    """Logical axes of parameters: a tensor that has one of them is split along it."""
    splits_batch: bool = False
    """Its devices have rows of their own of each batch."""


# Devices are numbered host after host. tp talks most, so that it is innermost: its devices are neighbours.
# dp_replicate talks once a step, so that it is outermost: of several hosts it is the first axis that crosses.
MESH_AXES = (
    MeshAxis(name=DP_REPLICATE, splits_batch=True),
    MeshAxis(name=PP, splits=(LAYER,)),
    MeshAxis(name=DP_SHARD, splits_batch=True),
    MeshAxis(name=TP, splits=("heads", "mlp", "vocab")),
)
"""All of them, outermost first."""

AXES = tuple(axis.name for axis in MESH_AXES)
"""Their names, outermost first."""

ROWS = tuple(axis.name for axis in MESH_AXES if axis.splits_batch)
"""Axes whose devices have rows of their own, outermost first."""

SPLIT = {logical: axis.name for axis in MESH_AXES for logical in axis.splits}
"""Logical axis of a parameter -> the mesh axis that splits it."""


def means_of(parameter: Iterable[str]) -> tuple[str, ...]:
    """The mesh axes over which a gradient is a mean, outermost first; of a parameter by its logical axes.

    Along the others devices work on one batch together, or hold other parameters: what they have of a
    gradient is whole, or a part of a sum.
    """
    split = {SPLIT.get(axis) for axis in parameter}
    return tuple(axis for axis in ROWS if axis not in split)


SHARDED_FROM = {"optimizer": 1, "gradients": 2, "parameters": 3}
"""What dp_shard splits besides the batch: each of these from that ZeRO stage on."""


def joined(*names: str) -> str:
    """The name of several axes as one, for what runs along all of them together."""
    return "+".join(names)
