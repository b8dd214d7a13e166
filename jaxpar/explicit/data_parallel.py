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
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from compare.spec.axes import CP
from compare.spec.experiment import Layout
from jaxpar.explicit.replicas import REPLICA, axes_in, axes_of_replicas, copies
from jaxpar.mlp import Routing
from jaxpar.model import Loss
from jaxpar.placement import merge_dims, specs, split_dim


def each_replica(loss: Loss, layout: Layout) -> Loss:
    """The mean loss of all replicas, each on its part of a batch; the model is typed as if there were one.

    The batch is (R b, ...); for a pipeline (M, R b, ...). cp splits the last dim, T, of all but keys.
    Parameters are typed `reduced`: each replica has its `copies`; a parameter that dp_shard splits stays so:
    the model gathers it (`own_copy`).
    """
    axes, devices = axes_of_replicas(layout.axes), layout.cp
    replicas, rows_dim = math.prod(layout.axes[axis] for axis in axes), 1 if layout.pp > 1 else 0

    def is_split(w: jax.Array) -> bool:
        return bool(axes_in(jax.typeof(w).sharding.spec) & set(axes))

    def of_each(x: jax.Array, *, has_positions: bool) -> jax.Array:
        """(.., R b, .., T) -> (R n, .., b, .., t), T cut if it `has_positions`."""
        x = jnp.moveaxis(split_dim(x, rows_dim, replicas // devices, -1), rows_dim, 0)
        if devices == 1:
            return x
        rest, *others = jax.typeof(x).sharding.spec.partitions
        if has_positions:
            x = jnp.moveaxis(split_dim(x, x.ndim - 1, devices, -1), -2, 1)
        else:
            x = jnp.broadcast_to(
                x[:, None], (len(x), devices, *x.shape[1:]), out_sharding=P(rest, CP, *others)
            )
        others = [None] * len(others)
        return x.reshape(replicas, *x.shape[2:], out_sharding=P(axes, *others))

    def of_all(x: jax.Array) -> jax.Array:
        """(L, R n, b, t, ..) -> (L, R b, T, ..)."""
        rest = tuple(axis for axis in axes if axis != CP) or None
        shape = len(x), replicas // devices, devices, *x.shape[2:]
        x = jnp.moveaxis(x.reshape(shape, out_sharding=P(None, rest, CP)), 2, 3)
        return merge_dims(merge_dims(x, 3), 1)

    def mean_loss(params: Any, batch: Any) -> tuple[jax.Array, Routing]:
        copied = jax.tree.map(lambda w: None if is_split(w) else copies(w), params)

        # `vmap` refuses to be given what is split.
        def of_replica(copied: Any, rows: Any) -> tuple[jax.Array, Routing]:
            return loss(jax.tree.map(lambda w, copy: w if copy is None else copy, params, copied), rows)

        if replicas == 1:
            return of_replica(copied, batch)
        parts = {name: of_each(x, has_positions=name != "keys") for name, x in batch.items()}
        # expert_ids is (L, R n, b, t, k); tokens_per_expert is already summed over replicas.
        out_axes = 0, Routing(expert_ids=1)
        value_R, routing = jax.vmap(of_replica, out_axes=out_axes, axis_name=REPLICA)(copied, parts)
        return value_R.mean(axis=0), routing._replace(expert_ids=jax.tree.map(of_all, routing.expert_ids))

    return mean_loss


def synchronize_gradients(gradients: Any, placements: Any, *, sharded: bool) -> Any:
    """Sum gradients that are unreduced: the one all-reduce over replicas.

    `sharded` says that dp_shard splits them already.
    """
    return reshard(gradients, specs(placements, sharded=sharded))
