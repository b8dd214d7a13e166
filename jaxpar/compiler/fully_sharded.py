"""Fully sharded data parallelism by the compiler: constrain the state to shards, and XLA moves it.

    zero   split over dp_shard              communication that XLA inserts
    1      moments and the update           gradients reduced once a step, parameters gathered once a step
    2      + accumulated gradients          gradients reduced once a microbatch
    3      + parameters                     gathered in the layer loop, in forward and again in backward;
                                            gradients reduced in the backward loop, layer by layer

dp_shard splits one dim of each parameter. Each constraint to a full layout is an all-gather. Stages 1 and 2
constrain gradients to shards, a reduce-scatter; on a CPU XLA sends an all-reduce and takes a slice. In stage
3 the derivative of the gather constrains each layer's gradient to be full: an all-reduce, and then a slice.

Stage 3 relies on the scan over layers. Outside of a loop XLA would gather every layer once and store it. In
the scan each layer constrains its own parameters to be full. A remat policy drops the full copy after
forward, so backward gathers the layer again.
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
    """Constrain parameters, gradients or moments to shards over dp_shard."""
    # Zero 1: a reduce-scatter of gradients after the last pass. Zero 2: after each pass. Zero 3: a slice of
    # sums, which the derivative of `gather` makes: it constrains each layer's gradient to be full.
    # Full parameters before the update: a slice. After it the out_shardings of the jit all-gather them.
    return lax.with_sharding_constraint(tree, specs(placements, sharded=True))


def gather(params: Any, placements: Any) -> Any:
    """Constrain shards of parameters to full ones, and remove the padding."""
    # XLA all-gathers over dp_shard.
    gathered = lax.with_sharding_constraint(params, specs(placements, sharded=False))
    return unpad(gathered, placements)


def gather_layers(hooks: Hooks, placements: Any, layout: Layout) -> None:
    """Stage 3: each scanned block gathers its own parameters, in forward and again in backward."""
    placements = drop_layer_dim(placements)
    # A remat policy receives operations, not names: a constraint to one of these specs is a gather.
    stage_dim = (PP,) if layout.pp > 1 else ()  # `vmap` over stages adds it to each constraint of a block
    full_specs = {
        _split_dims((*stage_dim, *spec)) for spec in jax.tree.leaves(specs(placements, sharded=False))
    }

    def is_gather(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
        is_constraint = primitive.name == "sharding_constraint"
        return is_constraint and _split_dims(parameters["sharding"].spec) in full_specs

    # Forward gathers a layer when the scan reaches it. Backward reaches the layers in reverse order.
    hooks.gather_layer = lambda shards, x_BTC: gather(shards, placements)
    hooks.is_gather, hooks.keep_gathered = is_gather, not layout.reshard_after_forward


def gather_first(loss: Loss, placements: Any, *, layers_too: bool = False) -> Loss:
    """A loss of shards that gathers embeddings and last norm first.

    `layers_too`: also the blocks, for a pipeline that keeps what it gathers.

    These parameters stay in memory until backward is done.
    """

    def gathering(params: Any, batch: Any) -> tuple[jax.Array, Routing]:
        # One all-gather for each parameter outside the blocks.
        params = {**params, **gather(without_layers(params), without_layers(placements))}
        if layers_too:
            # One all-gather for the whole stack, before any loop.
            params[STACKED] = _gather_before_loop(params[STACKED], placements[STACKED])
        return loss(params, batch)

    return gathering


def _gather_before_loop(params: Any, placements: Any) -> Any:
    """As `gather`, but the gradient is constrained to shards.

    The derivative of a constraint applies the same constraint to the gradient. A loop would then accumulate
    full gradients.
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
    """Entries of a PartitionSpec without the trailing None, which JAX may add or omit."""
    dims = tuple(spec)
    while dims and dims[-1] is None:
        dims = dims[:-1]
    return dims
