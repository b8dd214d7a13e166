"""Pipeline parallelism by the compiler: stages are a dim of the arrays, and a roll along it is the network.

    layers [S@pp, ...], x [S@pp, ...]    constrained: pp splits the dim of stages
    a tick                               one function, `vmap`ped over the stages; nothing is sent
    the shift                            a roll by one stage; XLA makes a collective permute of it
    embedding, norm, head                on every stage, for its share of the microbatches

The loop over ticks is `jaxpar.tick_loop`, which jax-explicit runs, too; its legend holds here.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from compare.spec.axes import PP
from jaxpar import tick_loop
from jaxpar.hooks import Hooks
from jaxpar.model import Loss, PipelineParts

AXIS = PP


def pipelined(parts: PipelineParts, hooks: Hooks, *, stages: int, chunks: int = 1) -> Loss:
    """The loss of a pipeline, as `tick_loop.pipelined`."""
    return tick_loop.pipelined(
        parts,
        hooks,
        stages=stages,
        chunks=chunks,
        # Adds pp to each sharding constraint inside, for the dim of stages.
        over_stages=partial(jax.vmap, spmd_axis_name=AXIS),
        place=split_stages,
        # XLA sends each entry to the next device.
        roll=partial(jnp.roll, axis=0),
    )


def split_stages(tree: Any) -> Any:
    """Constrain the first dim of arrays (S, ...) to be split over pp; XLA chooses for the other dims."""

    def constrain(x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, P(AXIS, *(P.UNCONSTRAINED,) * (x.ndim - 1)))

    return jax.tree.map(constrain, tree)
