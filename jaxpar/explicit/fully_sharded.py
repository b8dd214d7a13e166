"""Fully sharded data parallelism in types: casts between shards and full parameters that are reduced.

    zero   casts                                                    communication
    1      gradients {U:dp} -> [d@dp_shard], once a step            reduce-scatter
           updated parameters [d@dp_shard] -> whole, once a step    all-gather
    2      gradients {U:dp} -> [d@dp_shard], once a pass            reduce-scatter
           updated parameters, as under 1                           all-gather
    3      parameters [d@dp_shard] -> {R:dp} in the layer loop      all-gather, and again in backward
           gradients {U:dp} -> [d@dp_shard] in the backward loop    reduce-scatter

[d@dp_shard]: dp_shard splits a dim. {R:dp}: equal on all devices of dp; its gradient is {U:dp}, a partial sum
on each device.

No backward is written for stage 3. The gradient of {R:dp} is {U:dp}, and the gradient of a shard is a shard.
The derivative of the cast goes from one to the other. A remat policy drops a gathered layer after forward, so
backward gathers it again. XLA on a CPU makes no reduce-scatter of the cast: it all-reduces and takes a slice.
"""

from typing import Any

import jax
from jax.sharding import reshard

from compare.spec.axes import SHARDS
from compare.spec.experiment import Layout
from jaxpar.explicit.sharding_types import reduced_specs, unreduced_specs
from jaxpar.hooks import Hooks
from jaxpar.mlp import Routing
from jaxpar.model import Loss
from jaxpar.placement import drop_layer_dim, specs, unpad


def scatter_gradients(gradients: Any, placements: Any) -> Any:
    """Sum gradients over dp_shard into shards; along other replicas they stay unreduced."""
    # Reduce-scatter {U:dp} -> [d@dp_shard].
    return reshard(gradients, unreduced_specs(placements, sharded=True))


def shard_parameters(params: Any, placements: Any) -> Any:
    """Shards of parameters. Nothing is sent."""
    return reshard(params, specs(placements, sharded=True))


def gather_updated(shards: Any, placements: Any, *, zero: int) -> Any:
    """Parameters as they are stored between steps, from the shards that the optimizer updated."""
    # Stages 1 and 2: all-gather once a step. Stage 3 stores shards: nothing is sent.
    return reshard(shards, specs(placements, sharded=zero == 3))


def gather(shards: Any, placements: Any) -> Any:
    """Full parameters without padding, {R:dp}, of shards under the keys of `placements`."""
    sharded = {key: shards[key] for key in placements}
    # All-gather [d@dp_shard] -> {R:dp}. In backward its derivative reduce-scatters the gradients.
    full = reshard(sharded, reduced_specs(placements, sharded=False))
    return {**shards, **unpad(full, placements)}


def gather_layers(hooks: Hooks, placements: Any, layout: Layout) -> None:
    """Every scanned block gathers its own parameters."""
    placements = drop_layer_dim(placements)
    hooks.gather_layer = lambda shards, x_BTC: gather(shards, placements)
    hooks.is_gather, hooks.keep_gathered = is_gather, not layout.reshard_after_forward


def is_gather(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
    """True if an operation makes a full parameter, or computes from full parameters alone.

    A remat policy calls it. The type tells: only a gathered parameter is reduced along dp_shard.
    """

    def is_gathered(sharding: Any) -> bool:
        return any(axis in sharding.spec.reduced for axis in SHARDS)

    if primitive.name == "reshard" and is_gathered(parameters["dst_sharding"]):
        return True
    return bool(arguments) and all(is_gathered(x.sharding) for x in arguments)


def gather_first(loss: Loss, placements: Any) -> Loss:
    """A loss that first gathers the parameters under the keys of `placements`, and keeps them.

    They are the embeddings and the last norm, with one all-gather each before the layer loop. A pipeline that
    keeps what it gathers gathers its blocks here, too.
    """

    def gathering(params: Any, batch: Any) -> tuple[jax.Array, Routing]:
        return loss(gather(params, placements), batch)

    return gathering
