"""Data parallelism by the compiler: shardings of the inputs are enough, and XLA inserts the all-reduce.

    array         spec             on each device
    parameters    P()              all of them
    batch         P(None, ROWS)    a share of the rows
    gradients     P()              all of them: XLA all-reduces the share of each device

The whole lesson in code:

    @partial(jax.jit, in_shardings=(P(), P(None, ROWS)), out_shardings=P())
    def step(params, batch):
        return jax.value_and_grad(loss)(params, batch)

The loss is a mean over all rows, as on one device. XLA derives that this mean and its gradients need a sum
over devices. It places the sum where a gradient is made, in the backward loop over layers. A loop over
microbatches then repeats the sum in each iteration. `synchronize_gradients` moves it behind that loop.

Legend: A passes that accumulate, R replicas, B rows of a pass.
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
    has_inner_loop: bool = False,
) -> tuple[tuple[jax.Array, Routing], Any]:
    """Mean loss and gradients over a batch that is split over devices, reduced once, after accumulation.

    XLA has no option that defers a reduction. Here the replicas become a dim of the arrays. The loop then
    makes one gradient for each replica, and the mean over the dim after the loop is the only reduction. Each
    device stores the slice of its own replica, so memory does not grow.

    Args:
        gradients_of: maps (params, batch) to loss, routing and gradients; accumulates over A.
        batch: arrays (A, B, ...); the axes `compare.spec.axes.ROWS` split B.
        axes: the first of ROWS; they become the dim of replicas.
        has_inner_loop: `gradients_of` also loops within a pass, as a pipeline does.
    """
    mesh = jax.sharding.get_abstract_mesh()
    replicas = math.prod(mesh.shape[axis] for axis in axes)
    if replicas == 1 or (jax.tree.leaves(batch)[0].shape[0] == 1 and not has_inner_loop):
        # A single pass: XLA's own all-reduce in backward runs once already.
        return gradients_of(params, batch)
    inner = tuple(axis for axis in ROWS if axis not in axes and axis in mesh.shape)

    def with_replica_dim(x: jax.Array) -> jax.Array:
        """(A, B, ...) -> (A, R, B / R, ...); each device keeps its rows."""
        x = x.reshape(x.shape[0], replicas, x.shape[1] // replicas, *x.shape[2:])
        free = (P.UNCONSTRAINED,) * (x.ndim - 3)
        return lax.with_sharding_constraint(x, P(None, axes, inner, *free))

    def split_replica_dim(x: jax.Array) -> jax.Array:
        """Constrain R, the first dim, to be split over `axes`."""
        free = (P.UNCONSTRAINED,) * (x.ndim - 1)
        return lax.with_sharding_constraint(x, P(axes, *free))

    # Accumulate for each replica: its rows and its gradient are on the same devices, so nothing is sent.
    # expert_ids has its replica dim at 2; tokens_per_expert is already summed over replicas.
    out_axes = (0, Routing(expert_ids=2)), 0
    each_replica = jax.vmap(gradients_of, in_axes=(None, 1), out_axes=out_axes, spmd_axis_name=axes)
    (value, routing), gradients = each_replica(params, jax.tree.map(with_replica_dim, batch))
    # A mean over the split dim R: XLA sends one all-reduce of loss and gradients, after the last pass.
    value, gradients = jax.tree.map(lambda x: split_replica_dim(x).mean(axis=0), (value, gradients))
    expert_ids = jax.tree.map(partial(merge_dims, dim=2), routing.expert_ids)
    return (value, routing._replace(expert_ids=expert_ids)), gradients
