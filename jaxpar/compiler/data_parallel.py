"""Data parallelism by the compiler: shardings of the inputs are enough, and XLA inserts the all-reduce.

    array         spec             on each device
    parameters    P()              all of them
    batch         P(None, ROWS)    a share of the rows
    gradients     P()              all of them: XLA all-reduces the share of each device

`reduce_in_backward` is the whole lesson. The loss is a mean over all rows, as on one device. XLA derives that
this mean and its gradients need a sum over devices. It places the sum where a gradient is made, in the
backward loop over layers. A loop over passes, or over chunks of logits, would repeat the sum in each turn. So
with such a loop `reduce_after_accumulation` moves the sum behind it.

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
from compare.spec.experiment import Experiment
from jaxpar.mlp import Routing
from jaxpar.placement import merge_dims

AXIS = DP_REPLICATE


GradientsOf = Callable[[Any, Any], tuple[tuple[jax.Array, Routing], Any]]
"""(params, batch) -> the mean loss with routing, and its gradients, accumulated over the A passes."""


def synchronize_gradients(
    gradients_of: GradientsOf,
    params: Any,
    batch: Any,
    *,
    axes: tuple[str, ...] = (AXIS,),
    deferred: int = 1,
) -> tuple[tuple[jax.Array, Routing], Any]:
    """Mean loss and gradients over a batch (A, B, ...) whose rows are split over devices.

    Args:
        axes: the first of `compare.spec.axes.ROWS`: gradients are summed over them once, after all passes.
        deferred: `deferred_replicas` along `axes`, whose mean gradients are averaged after all passes.
    """
    if deferred > 1:
        return reduce_after_accumulation(gradients_of, params, batch, axes=axes, replicas=deferred)
    return reduce_in_backward(gradients_of, params, batch)


def deferred_replicas(experiment: Experiment, axes: tuple[str, ...]) -> int:
    """Number of replicas along `axes` that reduce after a loop over passes, ticks or chunks; without, 1."""
    train = experiment.train
    has_loop = experiment.layout.pp > 1 or train.gradient_accumulation_steps > 1 or train.loss_chunks > 1
    return math.prod(experiment.layout.axes[axis] for axis in axes) if has_loop else 1


def reduce_in_backward(
    gradients_of: GradientsOf, params: Any, batch: Any
) -> tuple[tuple[jax.Array, Routing], Any]:
    """Mean loss and gradients, by the code of one device."""

    def split_rows(x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, P(None, ROWS, *(P.UNCONSTRAINED,) * (x.ndim - 2)))

    # Each device has some rows and all parameters. XLA all-reduces each gradient when backward has made it.
    return gradients_of(params, jax.tree.map(split_rows, batch))


def reduce_after_accumulation(
    gradients_of: GradientsOf, params: Any, batch: Any, *, axes: tuple[str, ...], replicas: int
) -> tuple[tuple[jax.Array, Routing], Any]:
    """Mean loss and gradients, reduced over `axes` once, after all passes.

    XLA has no option that defers a reduction. Here the replicas become a dim of the arrays. The loop then
    makes one gradient for each replica, and the mean over the dim after the loop is the only reduction over
    `axes`. Each device stores the slice of its own replica, so memory does not grow. Under cp and ep XLA
    still sums over these axes in each pass.
    """
    inner = tuple(axis for axis in ROWS if axis not in axes)

    def with_replica_dim(x: jax.Array) -> jax.Array:
        """(A, B, ...) -> (A, R, B / R, ...); each device keeps its rows."""
        x = x.reshape(x.shape[0], replicas, x.shape[1] // replicas, *x.shape[2:])
        free = (P.UNCONSTRAINED,) * (x.ndim - 3)
        return lax.with_sharding_constraint(x, P(None, axes, inner, *free))

    def split_replica_dim(x: jax.Array) -> jax.Array:
        """Constrain R, the first dim, to be split over `axes`."""
        free = (P.UNCONSTRAINED,) * (x.ndim - 1)
        return lax.with_sharding_constraint(x, P(axes, *free))

    # Accumulate for each replica: its rows and its gradient are on the same devices, so `axes` send nothing.
    # expert_ids has its replica dim at 2; tokens_per_expert is already summed over replicas.
    out_axes = (0, Routing(expert_ids=2)), 0
    each_replica = jax.vmap(gradients_of, in_axes=(None, 1), out_axes=out_axes, spmd_axis_name=axes)
    (value, routing), gradients = each_replica(params, jax.tree.map(with_replica_dim, batch))
    # A mean over the split dim R: XLA sends one all-reduce of loss and gradients, after the last pass.
    value, gradients = jax.tree.map(lambda x: split_replica_dim(x).mean(axis=0), (value, gradients))
    expert_ids = jax.tree.map(partial(merge_dims, dim=2), routing.expert_ids)
    return (value, routing._replace(expert_ids=expert_ids)), gradients
