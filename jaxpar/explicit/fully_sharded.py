"""Fully sharded data parallelism in types: a shard, a whole that is reduced, and the casts between them.

    zero   types                                                  what a cast is
    1      gradients {U:dp} -> [d@dp_shard], once a step          a reduce-scatter; then gathers of parameters
    2      the same, once a pass, before they are added up        a reduce-scatter a pass
    3      parameters [d@dp_shard] -> {R:dp} in the layer loop    a gather; its derivative is a reduce-scatter

Of stage 3 nobody writes the backward: the gradient of what is {R:dp} is {U:dp}, that of a shard is a shard,
and the derivative of the cast goes from one to the other. Where the compiler's way has a constraint that
backward may, or may not, take up, types leave no choice. On a CPU XLA makes no reduce-scatter of the cast: it
all-reduces and takes a slice.
"""

from typing import Any

import jax
from jax.sharding import reshard

from compare.spec.axes import SHARDS
from compare.spec.experiment import Layout
from jaxpar.explicit.replicas import over_replicas, own_copy
from jaxpar.hooks import Hooks
from jaxpar.mlp import Routing
from jaxpar.model import Loss
from jaxpar.placement import drop_layer_dim, specs, unpad


def scatter_gradients(gradients: Any, placements: Any) -> Any:
    """Sum gradients over dp_shard, each device's shard of them; over replicas they stay unreduced."""
    return reshard(gradients, over_replicas(placements, "unreduced", sharded=True))


def shard_parameters(tree: Any, placements: Any) -> Any:
    """Each device's shard of parameters: nothing moves."""
    return reshard(tree, specs(placements, sharded=True))


def gather(params: Any, placements: Any) -> Any:
    """Parameters whole along dp_shard, reduced; padded as they are stored."""
    return reshard(params, over_replicas(placements, "reduced", sharded=False))


def is_gather(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
    """True if an operation makes a whole parameter or a copy of one, for remat policies: its type says so."""
    types = [parameters["dst_sharding"]] if primitive.name == "reshard" else []
    types += [of.sharding for of in arguments if hasattr(of, "sharding")]
    return any(axis in sharding.spec.reduced for sharding in types for axis in SHARDS)


def gather_layers(hooks: Hooks, placements: Any, layout: Layout) -> None:
    """Every scanned block gathers its own parameters."""
    placements = drop_layer_dim(placements)

    def gather_layer(shards: Any, x_BTC: jax.Array) -> Any:
        full = gather(shards, placements)
        return unpad(jax.tree.map(lambda w: own_copy(w, x_BTC), full), placements)

    hooks.gather_layer = gather_layer
    hooks.is_gather, hooks.keep_gathered = is_gather, not layout.reshard_after_forward


def gather_first(loss: Loss, placements: Any) -> Loss:
    """A loss that begins by gathering what these placements have, and keeps it."""

    def gathering(params: Any, batch: Any) -> tuple[jax.Array, Routing]:
        rest = {key: params[key] for key in placements}
        return loss({**params, **gather(rest, placements)}, batch)

    return gathering
