"""Data parallelism by the compiler: say where things live, and XLA inserts the communication.

    parameters   P()              every device has all of them
    batch        P(None, ROWS)    every device has a share of the rows
    loss         the mean over all rows, as on one device

That is all of it:

    @partial(jax.jit, in_shardings=(P(), P(None, ROWS)), out_shardings=P())
    def step(params, batch):
        return jax.value_and_grad(loss)(params, batch)

The loss needs a sum over devices, and its gradients too: the partitioner finds out. It puts that sum where a
gradient is made: inside the backward loop over layers, and inside a loop over microbatches, too. There it
would reduce at every turn. `synchronize_gradients` makes it one reduction.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from compare.spec.axes import DP_REPLICATE, ROWS
from jaxpar.mlp import Routing
from jaxpar.placement import merge_dims

AXIS = DP_REPLICATE


def synchronize_gradients(
    gradients_of: Callable[[Any, Any], tuple[tuple[jax.Array, Routing], Any]],
    params: Any,
    batch: Any,
    *,
    axes: tuple[str, ...] = (AXIS,),
    loops: bool = False,
) -> tuple[tuple[jax.Array, Routing], Any]:
    """Mean loss and gradients over a batch that is split over devices, reduced once, after accumulation.

    There is no "do not reduce yet" to tell a partitioner. But if replicas are a dim of the arrays, the loop
    makes a gradient for each replica, and the mean over that dim after it is the one reduction. Each device
    has its own replica's slice: no more memory than before.

    `gradients_of` (params, batch) accumulates over A of a batch (A, B, ...), B split by rows' axes, of which
    `axes`, the first, become a dim. `loops`: it loops in each of the A, too, as a pipeline does.
    """
    mesh = jax.sharding.get_abstract_mesh()
    replicas = math.prod(mesh.shape[axis] for axis in axes)
    if replicas == 1 or (jax.tree.leaves(batch)[0].shape[0] == 1 and not loops):
        return gradients_of(params, batch)
    inner = tuple(axis for axis in ROWS if axis not in axes and axis in mesh.shape)

    def with_replica_dim(x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], replicas, x.shape[1] // replicas, *x.shape[2:])
        free = (P.UNCONSTRAINED,) * (x.ndim - 3)
        return lax.with_sharding_constraint(x, P(None, axes, inner, *free))

    def replica_dim_split(x: jax.Array) -> jax.Array:
        free = (P.UNCONSTRAINED,) * (x.ndim - 1)
        return lax.with_sharding_constraint(x, P(axes, *free))

    # expert_ids has its replica dim at 2; tokens_per_expert is already summed over replicas.
    out_axes = (0, Routing(expert_ids=2)), 0
    each_replica = jax.vmap(gradients_of, in_axes=(None, 1), out_axes=out_axes, spmd_axis_name=axes)
    (value, routing), gradients = each_replica(params, jax.tree.map(with_replica_dim, batch))
    value, gradients = jax.tree.map(lambda x: replica_dim_split(x).mean(axis=0), (value, gradients))
    expert_ids = jax.tree.map(partial(merge_dims, dim=2), routing.expert_ids)
    return (value, routing._replace(expert_ids=expert_ids)), gradients
