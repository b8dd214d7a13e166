"""The axes of the mesh, declared once: their names and order, what each splits, and who shares a batch.

    axis           what its devices split                        rows of a batch     positions
    dp_replicate   nothing: each has a replica                   its own             all
    pp             the layers                                    the same            all
    dp_shard       a replica's state, as far as ZeRO says        its own             all
    ep             experts; else it is a part of dp_shard        its own             all
    cp             nothing: each has a replica                   the same            its own
    tp             heads, MLP and vocabulary of each layer       the same            all

`layout.ep` splits the ranks of `layout.dp_shard`: in the mesh dp_shard has the rest of them, and both
together are what ZeRO splits all but experts over. Rows, split and means are derived from this table: a new
axis is a row of it.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct

PP, DP_REPLICATE, DP_SHARD, TP, EP, CP = "pp", "dp_replicate", "dp_shard", "tp", "ep", "cp"
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
    splits_sequence: bool = False
    """Its devices have positions of their own of each sequence."""


# Devices are numbered host after host. tp talks most, so that it is innermost: its devices are neighbours.
# dp_replicate talks once a step, so that it is outermost: of several hosts it is the first axis that crosses.
MESH_AXES = (
    MeshAxis(name=DP_REPLICATE, splits_batch=True),
    MeshAxis(name=PP, splits=(LAYER,)),
    MeshAxis(name=DP_SHARD, splits_batch=True),
    MeshAxis(name=EP, splits=("expert",), splits_batch=True),
    MeshAxis(name=CP, splits_sequence=True),
    MeshAxis(name=TP, splits=("heads", "mlp", "vocab")),
)
"""All of them, outermost first."""

AXES = tuple(axis.name for axis in MESH_AXES)
"""Their names, outermost first."""

ROWS = tuple(axis.name for axis in MESH_AXES if axis.splits_batch)
"""Axes whose devices have rows of their own, outermost first."""

SEQUENCE = tuple(axis.name for axis in MESH_AXES if axis.splits_sequence)
"""Axes whose devices have positions of their own."""

DATA = tuple(axis.name for axis in MESH_AXES if axis.splits_batch or axis.splits_sequence)
"""Axes whose devices have data of their own, outermost first: loss and gradients are means over them."""

SHARDS = (DP_SHARD, EP)
"""The axes that `layout.dp_shard` counts: ZeRO splits what is no expert over both."""

REPLICAS = tuple(name for name in DATA if name not in SHARDS)
"""Axes of data that ZeRO leaves alone: what it has split is summed over them."""

SPLIT = {logical: axis.name for axis in MESH_AXES for logical in axis.splits}
"""Logical axis of a parameter -> the mesh axis that splits it."""


def means_of(parameter: Iterable[str]) -> tuple[str, ...]:
    """The mesh axes over which a gradient is reduced, outermost first; of a parameter by its logical axes.

    Along the others devices work on one batch together, or hold other parameters: what they have of a
    gradient is whole, or a part of a sum. An expert's gradient is a sum over the rows of all of ep already;
    the mean divides it, too, by all of `DATA`.
    """
    split = {SPLIT.get(axis) for axis in parameter}
    return tuple(axis for axis in DATA if axis not in split)


SHARDED_FROM = {"optimizer": 1, "gradients": 2, "parameters": 3}
"""What dp_shard splits besides the batch: each of these from that ZeRO stage on."""


def joined(*names: str) -> str:
    """The name of several axes as one, for what runs along all of them together."""
    return "+".join(names)


def parts_of(name: str) -> list[str]:
    """The inverse of `joined`."""
    return name.split("+")


def joined_of(names: Iterable[str], degrees: Mapping[str, int]) -> str:
    """The name of several axes as one, without those of one device; "" if there is none."""
    return joined(*(name for name in names if degrees[name] > 1))
