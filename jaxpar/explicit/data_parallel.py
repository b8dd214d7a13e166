"""Data parallelism in types: parameters are "reduced", their gradients "unreduced", and one cast is the sum.

    parameter   {R:dp}   on every device the same
    batch       [B@dp]   rows are split
    gradient    {U:dp}   each device's part of the sum: of that much the type keeps account
    reshard     {U:dp} -> whole: the all-reduce, here and nowhere else

The compiler's way has no word for "do not reduce yet": it reduces where a gradient is made, in every turn of
every loop, unless replicas are a dim of the arrays. A type has that word. Parts are added to parts, over the
layers, over both uses of a tied embedding, and over all passes of an accumulation: then they are summed once.
"""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from compare.spec.axes import BATCH, DP_REPLICATE
from jaxpar.explicit.replicas import axes_in, axes_of_replicas, copies
from jaxpar.placement import specs
from jaxpar.problem import Loss

AXIS = DP_REPLICATE


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of a batch (A, B, ...): B is split, replicas outermost."""
    return NamedSharding(mesh, P(None, BATCH))


def each_replica(loss: Loss, *, mesh: Mesh) -> Loss:
    """The mean loss of all replicas, each on rows of its own; the model is typed as if there were one.

    Args:
        loss: of one replica, on a batch (b, ...).
        mesh: has the axes that split a batch, R devices in all.

    Returns:
        loss(params, batch) of parameters typed `reduced`, and a batch (R b, ...) that R devices split. A
        parameter that is split over one of these axes stays so: the model gathers it (`own_copy`).
    """
    axes = axes_of_replicas(mesh)
    replicas = math.prod(mesh.shape[axis] for axis in axes)
    if replicas == 1:
        return loss

    def mean_loss(params: Any, batch: Any) -> jax.Array:
        leaves, structure = jax.tree.flatten(params)
        split = [bool(axes_in(jax.typeof(leaf).sharding.spec) & set(axes)) for leaf in leaves]
        own = [None if is_split else copies(leaf) for leaf, is_split in zip(leaves, split, strict=True)]

        def of_replica(own: list[Any], rows: Any) -> jax.Array:
            mine = [w if is_split else o for w, o, is_split in zip(leaves, own, split, strict=True)]
            return loss(jax.tree.unflatten(structure, mine), rows)

        rows = jax.tree.map(lambda x: x.reshape(replicas, -1, *x.shape[1:]), batch)
        return jax.vmap(of_replica)(own, rows).mean(axis=0)

    return mean_loss


def synchronize_gradients(gradients: Any, placements: Any, *, sharded: bool) -> Any:
    """Sum gradients that are unreduced: the one all-reduce over replicas.

    Args:
        gradients: as they have accumulated.
        placements: of the parameters.
        sharded: they are split over dp_shard already.
    """
    return reshard(gradients, specs(placements, sharded=sharded))
