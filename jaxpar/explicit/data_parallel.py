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
from jax.sharding import Mesh, reshard

from jaxpar.explicit.replicas import axes_in, axes_of_replicas, copies
from jaxpar.placement import cut, specs
from jaxpar.problem import Choices, Loss


def each_replica(loss: Loss, *, mesh: Mesh, rows_dim: int = 0) -> Loss:
    """The mean loss of all replicas, each on rows of its own; the model is typed as if there were one.

    Replicas split the batch's `rows_dim`: 1 of (M, R b, ...). Parameters are typed `reduced`: each replica
    has its `copies`; a parameter that dp_shard splits stays so: the model gathers it (`own_copy`).
    """
    axes = axes_of_replicas(mesh)
    replicas = math.prod(mesh.shape[axis] for axis in axes)

    def is_split(w: jax.Array) -> bool:
        return bool(axes_in(jax.typeof(w).sharding.spec) & set(axes))

    def mean_loss(params: Any, batch: Any) -> tuple[jax.Array, Choices]:
        copied = jax.tree.map(lambda w: None if is_split(w) else copies(w), params)

        def of_replica(
            copied: Any, rows: Any
        ) -> tuple[jax.Array, Choices]:  # `vmap` refuses to be given what is split
            return loss(jax.tree.map(lambda w, copy: w if copy is None else copy, params, copied), rows)

        if replicas == 1:
            return of_replica(copied, batch)
        # (.., R b, ..) -> (.., R, b, ..)
        rows = jax.tree.map(lambda x: cut(x, rows_dim, replicas, -1), batch)
        out_axes = 0, Choices(experts=1)  # (L, R, b, ..), and tokens of all replicas (`count_replicas`)
        value_R, choices = jax.vmap(of_replica, in_axes=(0, rows_dim), out_axes=out_axes)(copied, rows)
        return value_R.mean(axis=0), choices.joined(1)

    return mean_loss


def synchronize_gradients(gradients: Any, placements: Any, *, sharded: bool) -> Any:
    """Sum gradients that are unreduced: the one all-reduce over replicas.

    `sharded` says that dp_shard splits them already.
    """
    return reshard(gradients, specs(placements, sharded=sharded))
