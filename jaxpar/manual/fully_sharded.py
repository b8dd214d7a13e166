"""Fully sharded data parallelism by hand (ZeRO): each device of dp_shard stores 1/n of a replica's state.

    zero   stored per device        reduce-scatter of gradients        all-gather of parameters
    1      moments / n              once a step, after accumulation    once a step, after the update
    2      + gradients / n          once a microbatch                  once a step, after the update
    3      + parameters / n         in backward, layer by layer        in forward, again in backward

An all-reduce is a reduce-scatter and an all-gather. The optimizer needs its slice alone, so stage 1 sends the
bytes of data parallelism. Stages 2 and 3 reduce once a microbatch, so no device accumulates full gradients.

Stage 3 writes the all-gather alone: autodiff transposes it to a reduce-scatter. A remat policy drops a
gathered layer after forward. Otherwise the full model would be in memory at the end of forward.
`reshard_after_forward = false` keeps the layers.

Runs inside `shard_map`, on leaves placed by `jaxpar.placement`, which pads short shards. Given the placements
of some keys of a tree, a function returns the other keys unchanged.
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
    """Reduce gradients over dp_shard and ep; under stage 3 each block also gathers its parameters."""
    if not experiment.layout.zero:
        return Strategy()

    def mark(p: Placement, x: jax.Array) -> jax.Array:
        """Mark x varying over each axis along which it is full, so that its gradient stays local."""
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
    """Local shards of full parameters."""
    # A slice: nothing is sent.
    return _along_split_dims(collectives.local_shard, params, placements)


def scatter_gradients(gradients: Any, placements: Any) -> Any:
    """Local shards of the sums of padded gradients over dp_shard and ep."""
    # Stage 1: after the last pass. Stage 2: after backward of each microbatch.
    scatter = partial(collectives.reduce_scatter, purpose=GRADIENTS)
    return _along_split_dims(scatter, gradients, placements)


def mean_gradients(gradients: Any, placements: Any) -> Any:
    """Mean gradients over dp_shard and ep from scattered sums.

    The gradient of an expert is already a sum over ep: the tokens of all devices of ep reach it.
    """

    def mean(p: Placement, g: jax.Array) -> jax.Array:
        # All-reduce over the axes that do not split this parameter, once a step.
        unsplit = tuple(axis for axis in AXES if axis not in p.dims)
        return collectives.all_reduce(g, unsplit, purpose=GRADIENTS) / collectives.axis_size(AXES)

    return jax.tree.map(mean, placements, gradients)


def all_gather_parameters(shards: Any, placements: Any) -> Any:
    """Full padded parameters, from shards that the optimizer updated."""
    # Once a step. All devices receive equal parameters, so the result is marked invarying.
    all_gather = partial(collectives.all_gather, purpose=PARAMETERS, is_equal=True)
    return _along_split_dims(all_gather, shards, placements)


# Stage 3: parameters are shards, and each block gathers its parameters in the loop over blocks.


def gather_layers(hooks: Hooks, placements: Any, *, keep: bool) -> None:
    """Each scanned block gathers its parameters in forward, and again in backward unless `keep`."""
    placements = drop_layer_dim(placements)
    # All-gathers a layer when the scan reaches it. Backward reduce-scatters the gradients of the layer.
    hooks.gather_layer = lambda shards, x_BTC: unpad(gather(shards, placements), placements)
    hooks.is_gather, hooks.keep_gathered = _is_gather, keep


def _is_gather(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
    return primitive.name == "all_gather" and any(axis in parameters["axis_name"] for axis in AXES)


def gather_first(loss: Loss, placements: Any) -> Loss:
    """A loss that first gathers the parameters with these placements and keeps them until backward ends."""
    # Embeddings and last norm: one all-gather each, before the first layer. XLA moves it out of the loop over
    # passes, to once a step.
    return lambda shards, batch: loss(unpad(gather(shards, placements), placements), batch)


def gather(shards: Any, placements: Any) -> Any:
    """Full padded parameters from local shards. Backward reduce-scatters their gradients."""
    all_gather = partial(collectives.all_gather, purpose=PARAMETERS)
    return _along_split_dims(all_gather, shards, placements)


def _along_split_dims(move: Callable[..., jax.Array], tree: Any, placements: Any) -> Any:
    """Apply `move(x, axes, dim=...)` to each leaf that ZeRO splits, along its split dim."""

    def move_leaf(p: Placement, x: jax.Array) -> jax.Array:
        return move(x, p.shards, dim=p.shard_dim) if p.shards else x

    return map_placed(move_leaf, tree, placements)
