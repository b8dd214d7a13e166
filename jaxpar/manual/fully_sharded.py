"""Fully sharded data parallelism by hand (ZeRO): each device of dp_shard holds a part of one replica's state.

    zero   at rest, per device        reduce_scatter of gradients         all_gather of parameters
    1      moments / n                once a step, after accumulation     once a step, after the update
    2      + gradients / n            once a microbatch, as shards        once a step, after the update
    3      + parameters / n           in backward, layer by layer         in forward, again in backward

A reduce_scatter is half of an all-reduce, and its slice is all that the optimizer needs. Stages 2 and 3
reduce once a microbatch, so that no device holds a full accumulated gradient. Under stage 3 the transpose of
the all_gather is the reduce_scatter: autodiff writes it. A gathered layer must not be kept until backward, or
the full model would be there by the end of forward: a remat policy refuses it, unless reshard_after_forward
is false.

Runs inside `shard_map`, on leaves placed by `jaxpar.placement`: a short shard is padded. A function that is
given the placements of some keys of a tree leaves the others as they are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from compare.contract.communication import GRADIENTS, PARAMETERS
from compare.spec.axes import SHARDS
from compare.spec.experiment import Experiment
from jaxpar.comm import collectives
from jaxpar.hooks import Hooks
from jaxpar.manual.strategy import Strategy
from jaxpar.model import Loss
from jaxpar.placement import Placement, drop_layer_dim, map_placed, unpad
from jaxpar.remat import gathers_in_layers
from jaxpar.weights import STACKED

AXES = SHARDS


def strategy(experiment: Experiment, placements: Any, hooks: Hooks) -> Strategy:
    """Blocks gather themselves under stage 3; gradients that were scattered are sums over n devices."""
    if not experiment.layout.zero:
        return Strategy()

    def mark(p: Placement, x: jax.Array) -> jax.Array:
        split = [axis for axis in p.dims if experiment.layout.zero == 3 or axis not in p.shards]
        return collectives.to_varying(x, [axis for axis in AXES if axis not in split])

    if gathers_in_layers(experiment.layout):
        gather_layers(hooks, placements[STACKED], keep=not experiment.layout.reshard_after_forward)
    return Strategy(
        mark=lambda params: jax.tree.map(mark, placements, params),
        reduce=partial(mean_gradients, placements=placements),
    )


# Stages 1 and 2: parameters are full on every device; the optimizer updates shards of them.


def shard_parameters(params: Any, placements: Any) -> Any:
    """This device's shards of full parameters."""
    return _along_split_dims(collectives.own_shard, params, placements)


def scatter_gradients(gradients: Any, placements: Any) -> Any:
    """This device's shards of the sums, over ZeRO's axes, of gradients of stored size."""
    scatter = partial(collectives.reduce_scatter, purpose=GRADIENTS)
    return _along_split_dims(scatter, gradients, placements)


def mean_gradients(gradients: Any, placements: Any) -> Any:
    """Means over dp_shard and ep from scattered sums; what could not be scattered is reduced now.

    The gradient of an expert is a sum over ep's rows as it is: what was theirs came to it.
    """

    def mean(p: Placement, g: jax.Array) -> jax.Array:
        left = tuple(axis for axis in AXES if axis not in p.dims)
        return collectives.all_reduce(g, left, purpose=GRADIENTS) / collectives.axis_size(AXES)

    return jax.tree.map(mean, placements, gradients)


def all_gather_parameters(shards: Any, placements: Any) -> Any:
    """Full parameters of stored size, after an update of the shards."""
    join = partial(collectives.all_gather, purpose=PARAMETERS, is_equal=True)
    return _along_split_dims(join, shards, placements)


# Stage 3: parameters are shards, and each block gathers its own in the loop over blocks.


def gather_layers(hooks: Hooks, placements: Any, *, keep: bool) -> None:
    """Every scanned block gathers its own parameters; backward again, unless forward keeps them."""
    placements = drop_layer_dim(placements)
    hooks.gather_layer = lambda shards, x_BTC: unpad(gather(shards, placements), placements)
    hooks.is_gather, hooks.keep_gathered = _is_gather, keep


def _is_gather(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
    return primitive.name == "all_gather" and any(axis in parameters["axis_name"] for axis in AXES)


def gather_first(loss: Loss, placements: Any) -> Loss:
    """A loss that first gathers, and keeps, what has these placements: it is needed first and last."""
    return lambda shards, batch: loss(unpad(gather(shards, placements), placements), batch)


def gather(shards: Any, placements: Any) -> Any:
    """Parameters of stored size from this device's shards; differentiable: gradients arrive as shards."""
    join = partial(collectives.all_gather, purpose=PARAMETERS)
    return _along_split_dims(join, shards, placements)


def _along_split_dims(move: Callable[..., jax.Array], tree: Any, placements: Any) -> Any:
    """`move(x, axes, dim=...)` of every leaf that ZeRO splits, along the dim that it splits."""

    def moved(p: Placement, x: jax.Array) -> jax.Array:
        return move(x, p.shards, dim=p.shard_dim) if p.shards else x

    return map_placed(moved, tree, placements)
