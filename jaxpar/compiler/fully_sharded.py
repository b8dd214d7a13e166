"""Fully sharded data parallelism by the compiler: say where state lives, and XLA moves it.

    zero   constrained to shards of dp_shard          what XLA makes of it
    1      moments, and the update                    gradients reduced once, parameters gathered once
    2      + gradients, as they accumulate            gradients reduced once a microbatch
    3      + parameters                               gathered in the layer loop, forward and backward

Stage 3 needs the scan: unrolled layers would be gathered once and kept whole. In the loop each layer says
that it wants its parameters whole; what a remat policy refuses to keep, backward gathers again. On a CPU
XLA makes no reduce-scatter: it all-reduces and takes a slice. Under stage 2 with tp it was seen to exchange
the embedding's gradient rows by an all-to-all before adding them up, which is less than reducing the table.
"""

from collections.abc import Iterable
from typing import Any

import jax
from jax import lax

from compare.spec.axes import PP
from compare.spec.experiment import Layout
from jaxpar.hooks import Hooks
from jaxpar.mlp import Routing
from jaxpar.model import Loss
from jaxpar.placement import drop_layer_dim, specs, unpad
from jaxpar.weights import STACKED, without_layers


def shard_parameters(tree: Any, placements: Any) -> Any:
    """Say that parameters, or a tree like them of gradients or moments, are split over dp_shard."""
    return lax.with_sharding_constraint(tree, specs(placements, sharded=True))


def gather(params: Any, placements: Any) -> Any:
    """Say that parameters are whole along dp_shard, and take its padding off."""
    gathered = lax.with_sharding_constraint(params, specs(placements, sharded=False))
    return unpad(gathered, placements)


def gather_layers(hooks: Hooks, placements: Any, layout: Layout) -> None:
    """Stage 3: every scanned block wants its own parameters whole."""
    placements = drop_layer_dim(placements)
    in_front = (PP,) if layout.pp > 1 else ()  # `vmap` over stages adds it to what a block says
    leaves = jax.tree.leaves(specs(placements, sharded=False))
    gathered = {_split_dims((*in_front, *spec)) for spec in leaves}

    def is_gather(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
        return (
            primitive.name == "sharding_constraint" and _split_dims(parameters["sharding"].spec) in gathered
        )

    hooks.gather_layer = lambda shards, x_BTC: gather(shards, placements)
    hooks.is_gather, hooks.keep_gathered = is_gather, not layout.reshard_after_forward


def gather_first(loss: Loss, placements: Any, *, layers_too: bool = False) -> Loss:
    """The loss over shards: all but the blocks, or with `layers_too` all, is gathered up front, and kept."""

    def gathering(params: Any, batch: Any) -> tuple[jax.Array, Routing]:
        params = {**params, **gather(without_layers(params), without_layers(placements))}
        if layers_too:
            params[STACKED] = _gather_before_loop(params[STACKED], placements[STACKED])
        return loss(params, batch)

    return gathering


def _gather_before_loop(params: Any, placements: Any) -> Any:
    """`gather`, for a loop that accumulates gradients: these are split again.

    The derivative of saying "whole" says it of the gradient, too, which would accumulate whole.
    """

    @jax.custom_vjp
    def gathered(params: Any) -> Any:
        return lax.with_sharding_constraint(params, specs(placements, sharded=False))

    gathered.defvjp(
        lambda params: (gathered(params), None),
        lambda _, gradients: (shard_parameters(gradients, placements),),
    )
    return unpad(gathered(params), placements)


def _split_dims(spec: Iterable[Any]) -> tuple[Any, ...]:
    """A PartitionSpec without the dims at its end that are not split: these go without saying."""
    dims = tuple(spec)
    while dims and dims[-1] is None:
        dims = dims[:-1]
    return dims
