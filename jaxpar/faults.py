"""Mistakes to plant in what is traced and loaded inside, so that the ladder is seen to catch them.

A missing reduction is planted as one in which only the first device's part counts: the check of varying axes
would refuse to trace a step that leaves it out.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from compare.contract import faults as contract
from compare.contract.communication import ACTIVATIONS, GRADIENTS, NORM, REPLICATED_GRADIENTS, TIED_GRADIENTS
from compare.contract.faults import PlantedFault
from compare.numerics.boxes import Weights
from compare.side.recording import Progress
from compare.spec.axes import AXES, DP_REPLICATE, DP_SHARD, EP, PP, TP
from compare.spec.experiment import Experiment, Layout
from jaxpar import dropout, manual, optimizer, train
from jaxpar.comm import collectives
from jaxpar.explicit import context_parallel as typed_context_parallel
from jaxpar.explicit import data_parallel as typed_data_parallel
from jaxpar.explicit import tensor_parallel as typed_tensor_parallel
from jaxpar.linear import Linear, same
from jaxpar.manual import context_parallel, fully_sharded, pipeline_parallel, tensor_parallel
from jaxpar.mlp import Experts, RouterOutput
from jaxpar.model import GPT
from jaxpar.placement import Placement
from jaxpar.run import Run

Planted = AbstractContextManager


def in_place_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[[], Planted]]:
    """The decorated function stands in place of `owner.name`, which is its first argument."""

    def decorate(wrong: Callable[..., Any]) -> Callable[[], Planted]:
        def planted() -> Planted:
            right = getattr(owner, name)
            return patch.object(owner, name, lambda *args, **options: wrong(right, *args, **options))

        return planted

    return decorate


# At a collective of jax-manual ------------------------------------------------------------------------------


@contextmanager
def wrong_collectives(
    *kinds: str, axis: str, purpose: str, of: Callable[[jax.Array, str], jax.Array]
) -> Generator[None]:
    """Collectives of these kinds, along an axis and for a purpose, of `of(x, axis)` in place of x."""
    along, wanted = axis, purpose

    def wrong(right: Callable[..., jax.Array], x: jax.Array, axis: Any, *, purpose: str = "", **options: Any):
        axes = (axis,) if isinstance(axis, str) else axis
        x = of(x, axis) if along in axes and purpose == wanted else x
        return right(x, axis, purpose=purpose, **options)

    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(in_place_of(collectives, kind)(wrong)())
        yield


def first_only(x: jax.Array, axis: str) -> jax.Array:
    """x on the first device of an axis, zeros on the others: a sum over the axis has one term."""
    return jnp.where(lax.axis_index(axis) == 0, x, jnp.zeros_like(x))


def times_devices(x: jax.Array, axis: str) -> jax.Array:
    """x times the devices of an axis: a mean over the axis becomes the sum."""
    return x * collectives.axis_size(axis)


@in_place_of(manual, "global_norm")
def norm_counts_replicas_twice(right: Any, gradients: Any, placements: Any) -> jax.Array:
    square = jnp.square(optimizer.global_norm(gradients))  # of all that this device has
    for axis in AXES:  # split over it or not
        square = collectives.all_reduce(square, axis, purpose=NORM)
    return jnp.sqrt(square)


@in_place_of(context_parallel, "own_positions")
def local_positions(right: Any, order_S: np.ndarray, length: int) -> jax.Array:
    return jnp.arange(len(order_S) // collectives.axis_size(context_parallel.AXIS))


@in_place_of(context_parallel, "blocks")
def forgotten_hop(right: Any, q: jax.Array, source: jax.Array, layout: Layout) -> Iterator[tuple]:
    """The keys and values of the device before this one are handed on, and no query sees them."""
    is_next = source == (lax.axis_index(context_parallel.AXIS) - 1) % layout.cp
    for i, j, is_seen, places in right(q, source, layout):
        yield i, j, is_seen & ~is_next, places


@in_place_of(context_parallel, "attend_backward")
def stopped_maximum(right: Any, so_far: Any, q: jax.Array, g: jax.Array, lse: jax.Array, dot: jax.Array, *kv):
    """A row's sum of exponentials is taken for a constant, as behind two stop_gradients: v alone is right."""
    return right(so_far, q, g, lse, jnp.zeros_like(dot), *kv)


@in_place_of(fully_sharded, "mean_gradients")
def averaged_experts(right: Any, gradients: Any, placements: Any) -> Any:
    """Devices of ep take the mean of gradients that are of other experts each."""

    def mean(p: Placement, g: jax.Array) -> jax.Array:
        if EP not in p.dims or EP in p.shards:
            return g
        total = collectives.all_reduce(g, EP, purpose=GRADIENTS)
        return collectives.to_varying(total / collectives.axis_size(EP), EP)

    return jax.tree.map(mean, placements, right(gradients, placements))


# In a model's choice of experts -----------------------------------------------------------------------------


@in_place_of(jnp, "argsort")
def next_expert(right: Any, negative_logits_BTE: jax.Array, axis: int) -> jax.Array:
    return (right(negative_logits_BTE, axis=axis) + 1) % negative_logits_BTE.shape[axis]


@in_place_of(Experts, "weights")
def unrenormalised_weights(right: Any, self: Experts, logits: jax.Array, is_chosen: jax.Array) -> jax.Array:
    return jnp.where(is_chosen, jax.nn.softmax(logits, axis=-1), 0)


@in_place_of(GPT, "balance")
def local_balance(right: Any, self: GPT, routing: RouterOutput) -> tuple[jax.Array, jax.Array]:
    """The load-balance loss has each device's own shares of its own choices; what is recorded is of all."""
    total, self.total_counts = self.total_counts, same
    loss, _ = right(self, routing)
    self.total_counts = total
    return loss, right(self, routing)[1]


# At a cast of jax-explicit ----------------------------------------------------------------------------------


@in_place_of(typed_data_parallel, "copies")
def first_copy_only(right: Any, w: jax.Array) -> jax.Array:
    """Of a parameter's copies for replicas, only the first one's gradient counts."""
    copies = right(w)
    first = (np.arange(len(copies)) == 0).reshape(-1, *(1,) * (copies.ndim - 1))
    return jnp.where(first, copies, lax.stop_gradient(copies))


@in_place_of(typed_data_parallel, "synchronize_gradients")
def sum_over_replicas(right: Any, *arguments: Any, **options: Any) -> Any:
    count = jax.sharding.get_abstract_mesh().shape[DP_REPLICATE]
    return jax.tree.map(lambda g: count * g, right(*arguments, **options))


@in_place_of(typed_context_parallel, "own_rows")
def local_rows(right: Any, table: jax.Array, *, devices: int) -> jax.Array:
    return table[: len(table) // devices]


@in_place_of(typed_tensor_parallel, "product")
def first_part_only(right: Any, x: jax.Array, weight: jax.Array, contracted: int, out_sharding: Any = None):
    """Of a row-parallel product, only the first device's part counts."""
    if out_sharding == typed_tensor_parallel.UNREDUCED:
        dim, devices = x.ndim - contracted, jax.sharding.get_abstract_mesh().shape[TP]
        first = np.arange(x.shape[dim]) < x.shape[dim] // devices
        x = x * first.reshape(-1, *(1,) * (contracted - 1)).astype(x.dtype)
    return right(x, weight, contracted, out_sharding)


# In a model or an optimizer ---------------------------------------------------------------------------------


@in_place_of(Linear, "__call__")
def doubled_row_bias(right: Any, self: Linear, x: jax.Array) -> jax.Array:
    y = self.product(self.enter(x))
    return self.leave(y if self.bias is None else y + self.bias[...].astype(self.compute))


@in_place_of(optimizer, "clip")
def next_shard_s_gradients(right: Any, gradients: Any, norm: jax.Array, *, max_norm: float) -> Any:
    """A shard is updated with the next device's gradients."""
    shift = partial(collectives.shift, axis=DP_SHARD)
    return jax.tree.map(shift, right(gradients, norm, max_norm=max_norm))


def changed_updates(change: Callable[[Any, Any], Any]) -> Planted:
    """The optimizer gives `change(update, parameter)`."""

    @in_place_of(train, "make_optimizer")
    def wrong(make: Any, *args: Any, **options: Any) -> optax.GradientTransformationExtraArgs:
        right = make(*args, **options)

        def update(updates: Any, state: Any, params: Any = None, **of_step: Any):
            updates, state = right.update(updates, state, params, **of_step)
            return jax.tree.map(change, updates, params), state

        return optax.GradientTransformationExtraArgs(right.init, update)

    return wrong()


def to_8_bits(update: jax.Array, parameter: jax.Array) -> jax.Array:
    return (parameter + update).astype(jnp.bfloat16).astype(parameter.dtype) - parameter


# In a run ---------------------------------------------------------------------------------------------------


@in_place_of(train, "starting_parameters")
def moved_weight(right: Any, *args: Any) -> Weights:
    return contract.moved_weight(right(*args))


@in_place_of(Run, "placed")
def shifted_targets(right: Any, self: Run, arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Targets are shifted after the cut: the last one is the device's own first token."""
    inputs_ABT, cp = arrays["inputs"][..., self.order_T], self.experiment.layout.cp
    shifted = [np.roll(own_ABt, -1, axis=-1) for own_ABt in np.split(inputs_ABT, cp, axis=-1)]
    targets_ABT = np.concatenate(shifted, axis=-1)[..., self.order_T.argsort()]
    return right(self, {**arrays, "targets": targets_ABT})


@in_place_of(train, "device_scalars")
def skipped_last_update(right: Any, experiment: Experiment, progress: Progress) -> dict[str, np.ndarray]:
    scalars = right(experiment, progress)
    is_last = progress.step == experiment.train.max_iters - 1
    return scalars | {"learning_rate": scalars["learning_rate"] * (not is_last)}


MANUAL, TYPED, ALL = ("manual",), ("explicit",), ("compiler", "explicit", "manual")
gradients = partial(wrong_collectives, "all_reduce", axis=DP_REPLICATE, purpose=GRADIENTS)
row_products = partial(wrong_collectives, "all_reduce", "reduce_scatter", axis=TP, purpose=ACTIVATIONS)
partial_gradients = partial(wrong_collectives, "all_reduce", axis=TP, purpose=REPLICATED_GRADIENTS)
tied_gradients = partial(wrong_collectives, "all_reduce", axis=PP, purpose=TIED_GRADIENTS)
replaced_total = partial(patch.object, pipeline_parallel, "add", lambda total, gradients: gradients)
first_rows = partial(patch.object, tensor_parallel, "split_rows", lambda model, **options: None)
unscaled = partial(patch.object, dropout, "kept_scale", lambda rate: 1.0)

FAULTS = (
    PlantedFault("dropped_all_reduce", MANUAL, partial(gradients, of=first_only)),
    PlantedFault("dropped_all_reduce", TYPED, first_copy_only),
    PlantedFault("sum_for_mean", MANUAL, partial(gradients, of=times_devices)),
    PlantedFault("sum_for_mean", TYPED, sum_over_replicas),
    PlantedFault("dropped_tp_all_reduce", MANUAL, partial(row_products, of=first_only)),
    PlantedFault("dropped_tp_all_reduce", TYPED, first_part_only),
    PlantedFault("doubled_row_bias", MANUAL, doubled_row_bias),
    PlantedFault("same_dropout_on_every_rank", MANUAL, first_rows),
    PlantedFault("missing_norm_psum", MANUAL, partial(partial_gradients, of=first_only)),
    PlantedFault("norm_counts_replicas_twice", MANUAL, norm_counts_replicas_twice),
    PlantedFault("wrong_optimizer_shard", MANUAL, next_shard_s_gradients),
    PlantedFault("overwritten_microbatch", MANUAL, replaced_total),
    PlantedFault("stale_tied_copy", MANUAL, partial(tied_gradients, of=first_only)),
    PlantedFault("moved_weight", ALL, moved_weight),
    PlantedFault("shifted_targets", ALL, shifted_targets),
    PlantedFault("local_positions", MANUAL, local_positions),
    PlantedFault("local_positions", TYPED, local_rows),
    PlantedFault("forgotten_hop", MANUAL, forgotten_hop),
    PlantedFault("stopped_maximum", MANUAL, stopped_maximum),
    PlantedFault("next_expert", ALL, next_expert),
    PlantedFault("unrenormalised_weights", ALL, unrenormalised_weights),
    PlantedFault("local_balance", ALL, local_balance),
    PlantedFault("averaged_experts", MANUAL, averaged_experts),
    PlantedFault("unscaled_dropout", ALL, unscaled),
    PlantedFault("reversed_update", ALL, partial(changed_updates, lambda update, _: -update)),
    PlantedFault("rounded_weights", ALL, partial(changed_updates, to_8_bits)),
    PlantedFault("skipped_last_update", ALL, skipped_last_update),
)
