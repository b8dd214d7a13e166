"""Fully sharded data parallelism by hand (ZeRO): each device of dp_shard holds a part of one replica's state.

    zero   at rest, per device        reduce_scatter of gradients         all_gather of parameters
    1      moments / n                once a step, after accumulation     once a step, after the update
    2      + gradients / n            once a microbatch, as shards        once a step, after the update
    3      + parameters / n           in backward, layer by layer         in forward, again in backward

Stage 1 could all-reduce and let each device take its slice; the reduce_scatter is half of that all-reduce,
and the slice is all that the optimizer needs. Stages 2 and 3 reduce once a microbatch, so that no device
holds a whole accumulated gradient. Under stage 3 the transpose of the all_gather is the reduce_scatter:
autodiff writes it. A gathered layer must not be kept until backward, or the whole model would be there by the
end of forward: a remat policy refuses it, unless reshard_after_forward is false.

To be called inside `shard_map`, on leaves placed by `jaxpar.placement`. A leaf without dims to split is
whole everywhere, and its gradient is all-reduced.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax

from compare.contract.communication import GRADIENTS, PARAMETERS
from compare.spec.axes import DP_SHARD
from jaxpar.comm import collectives
from jaxpar.placement import Placement, map_repeated, one_layer
from jaxpar.problem import Edit, Loss
from jaxpar.remat import Remat, apply_remat

AXIS = DP_SHARD


def shard_parameters(params: Any, placements: Any) -> Any:
    """This device's shards of parameters that are whole on every device (stages 1 and 2)."""
    return _along_split_dims(collectives.own_shard, params, placements)


def all_gather_parameters(shards: Any, placements: Any) -> Any:
    """Whole parameters of stored size after an update of the shards (stages 1 and 2)."""
    join = partial(collectives.all_gather_equal, purpose=PARAMETERS)
    return _along_split_dims(join, shards, placements)


def gather(shards: Any, placements: Any) -> Any:
    """Whole parameters from this device's shards; differentiable: gradients arrive summed, as shards."""
    return unpad(gather_stored(shards, placements), placements)


def gather_stored(shards: Any, placements: Any) -> Any:
    """Parameters of stored size, each device's own copy: for gradients that `scatter_gradients` reduces."""
    join = partial(collectives.all_gather, purpose=PARAMETERS)
    return _along_split_dims(join, shards, placements)


def scatter_gradients(gradients: Any, placements: Any) -> Any:
    """This device's shards of the sums, over dp_shard, of whole gradients of stored size."""
    scatter = partial(collectives.reduce_scatter, purpose=GRADIENTS)
    return _along_split_dims(scatter, gradients, placements)


def mean_gradients(gradients: Any, placements: Any) -> Any:
    """Means over dp_shard from scattered sums; what could not be scattered is reduced now."""
    n = collectives.axis_size(AXIS)
    reduce = partial(collectives.all_reduce, axis=AXIS, purpose=GRADIENTS)
    sums = map_repeated(reduce, AXIS, placements, gradients)
    return jax.tree.map(lambda g: g / n, sums)


def mark_varying(params: Any, placements: Any, *, stage: int) -> Any:
    """Mark parameters that are whole on every device as each device's own: their gradients stay local."""
    if stage < 3:
        return collectives.to_varying(params, AXIS)
    return map_repeated(lambda x: collectives.to_varying(x, AXIS), AXIS, placements, params)


def unpad(params: Any, placements: Any) -> Any:
    """Local parameters without what only makes shards equal in size."""

    def cut(p: Placement, x: jax.Array) -> jax.Array:
        dim = p.dims.get(AXIS)
        if dim is None:
            return x
        return lax.slice_in_dim(x, 0, p.part(dim, sharded=False), axis=dim)

    return jax.tree.map(cut, placements, params)


def gather_layers(placements: Any, *, remat: Remat, reshard_after_forward: bool) -> Edit:
    """An edit of the model: every scanned layer gathers its own parameters.

    Args:
        placements: of the stacked layers' leaves.
        remat: what forward keeps besides gathered parameters.
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


def gather_non_layer_parameters(loss: Loss, placements: Any, *, stacked: str) -> Loss:
    """The loss over shards of a model whose layers gather themselves: all else is gathered up front.

    Embeddings and the last norm are one unit, needed first and last: gathered once, kept in between.
    """

    def gathering(shards: Any, batch: Any) -> jax.Array:
        rest = {key: p for key, p in placements.items() if key != stacked}
        whole = gather({key: shards[key] for key in rest}, rest)
        return loss({**shards, **whole}, batch)

    return gathering


def _along_split_dims(move: Callable[..., jax.Array], tree: Any, placements: Any) -> Any:
    """`move(x, AXIS, dim=...)` of every leaf that dp_shard splits, along the dim that it splits."""

    def moved(p: Placement, x: jax.Array) -> jax.Array:
        return move(x, AXIS, dim=p.dims[AXIS]) if AXIS in p.dims else x

    return jax.tree.map(moved, placements, tree)


def _is_gather(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
    return primitive.name == "all_gather" and AXIS in parameters["axis_name"]
