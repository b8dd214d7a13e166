"""Fully sharded data parallelism by hand: the devices of dp_shard share out one replica's state (ZeRO).

    zero   at rest, per device        reduce_scatter of gradients         all_gather of parameters
    1      moments / n                once a step, after accumulation     once a step, after the update
    2      + gradients / n            once a microbatch: shards pile up   once a step, after the update
    3      + parameters / n           in backward, layer by layer         in forward, again in backward

Stage 1 could all-reduce and let each device take its slice; the reduce_scatter is half of that all-reduce,
and the slice is all that the optimizer needs. Stages 2 and 3 reduce once a microbatch because the whole
gradient, piled up, is what they do away with. Under stage 3 the transpose of the all_gather is the
reduce_scatter: autodiff writes it. Nobody may keep a gathered layer until backward, or the whole model
would be there by the end of forward: a remat policy refuses it, unless reshard_after_forward is false.

To be called inside `shard_map`, on leaves placed by `jaxpar.placement`. A leaf without dims to split is
whole everywhere, and its gradient is all-reduced.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from compare.contract.axes import DP_SHARD
from compare.contract.communication import GRADIENTS, PARAMETERS
from jaxpar.comm import collectives
from jaxpar.placement import Placement, one_layer
from jaxpar.problem import Edit, Loss
from jaxpar.remat import Remat, apply_remat

AXIS = DP_SHARD


def gather(shards: Any, placements: Any) -> Any:
    """Whole parameters from this device's shards; differentiable: gradients arrive summed, as shards."""
    return strip_padding(gather_stored(shards, placements), placements)


def gather_stored(shards: Any, placements: Any) -> Any:
    """Parameters of stored size, each device's own copy: for gradients that `scatter_gradients` reduces."""

    def join(p: Placement, shard: jax.Array) -> jax.Array:
        if p.shard_dim is None:
            return shard
        return collectives.all_gather(shard, AXIS, dim=p.shard_dim, purpose=PARAMETERS)

    return jax.tree.map(join, placements, shards)


def own_copies(params: Any, placements: Any, *, stage: int) -> Any:
    """Mark what is whole on every device of dp_shard as each device's own: its gradient stays local."""

    def mark(p: Placement, x: jax.Array) -> jax.Array:
        return x if stage == 3 and p.shard_dim is not None else collectives.to_varying(x, AXIS)

    return jax.tree.map(mark, placements, params)


def scatter_gradients(gradients: Any, placements: Any) -> Any:
    """This device's shards of the sums, over dp_shard, of whole gradients of stored size."""

    def scatter(p: Placement, g: jax.Array) -> jax.Array:
        if p.shard_dim is None:
            return g
        return collectives.reduce_scatter(g, AXIS, dim=p.shard_dim, purpose=GRADIENTS)

    return jax.tree.map(scatter, placements, gradients)


def mean_gradients(gradients: Any, placements: Any) -> Any:
    """Means over dp_shard from scattered sums; what could not be scattered is reduced now."""
    n = collectives.axis_size(AXIS)

    def mean(p: Placement, g: jax.Array) -> jax.Array:
        return (collectives.all_reduce(g, AXIS, purpose=GRADIENTS) if p.shard_dim is None else g) / n

    return jax.tree.map(mean, placements, gradients)


def own_shards(params: Any, placements: Any) -> Any:
    """This device's shards of parameters that are whole on every device (stages 1 and 2)."""

    def own(p: Placement, x: jax.Array) -> jax.Array:
        return x if p.shard_dim is None else collectives.own_shard(x, AXIS, dim=p.shard_dim)

    return jax.tree.map(own, placements, params)


def whole_again(shards: Any, placements: Any) -> Any:
    """Whole parameters of stored size after an update of the shards (stages 1 and 2)."""

    def join(p: Placement, x: jax.Array) -> jax.Array:
        if p.shard_dim is None:
            return x
        return collectives.all_gather_equal(x, AXIS, dim=p.shard_dim, purpose=PARAMETERS)

    return jax.tree.map(join, placements, shards)


def strip_padding(params: Any, placements: Any) -> Any:
    """Local parameters without what only makes shards equal in size."""

    def strip(p: Placement, x: jax.Array) -> jax.Array:
        if p.shard_dim is None:
            return x
        return lax.slice_in_dim(x, 0, p.part(p.shard_dim, sharded=False), axis=p.shard_dim)

    return jax.tree.map(strip, placements, params)


def gather_layers(placements: Any, *, remat: Remat, reshard_after_forward: bool) -> Edit:
    """An edit of the model: every scanned layer gathers its own parameters.

    Args:
        placements: of the stacked layers' leaves.
        remat: what forward may keep, gathered parameters aside.
        reshard_after_forward: gather again in backward; false keeps what forward gathered.
    """
    placements = one_layer(placements)

    def wrap_layer(layer: Callable[..., Any]) -> Callable[..., Any]:
        def gathering(x: Any, shards: Any) -> Any:
            return layer(x, gather(shards, placements))

        return apply_remat(gathering, remat, is_gather=_is_gather, keep_gathered=not reshard_after_forward)

    def edit(model: Any) -> None:
        model.wrap_layer = wrap_layer

    return edit


def gather_the_rest(loss: Loss, placements: Any, *, stacked: str) -> Loss:
    """The loss of a model whose layers gather themselves, over shards: all else is gathered up front.

    Embeddings and the last norm are one unit, needed first and last: gathered once, kept in between.
    """

    def gathering(shards: Any, batch: Any) -> jax.Array:
        rest = {key: p for key, p in placements.items() if key != stacked}
        whole = gather({key: shards[key] for key in rest}, rest)
        return loss({**shards, **whole}, batch)

    return gathering


def _is_gather(primitive: Any, **parameters: Any) -> bool:
    return primitive.name == "all_gather" and AXIS in parameters["axis_name"]
