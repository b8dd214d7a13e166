"""Pipeline parallelism by the compiler: stages are a dim of the arrays, and a roll along it moves data.

    array or step               spec or code                communication that XLA inserts
    layers and state            [S@pp, ...]                 none
    a tick                      `vmap` over the S stages    none: each device computes its stage
    the shift after a tick      a roll of S by one          a collective permute to the next device
    embedding, norm and head    on every stage              none in forward: each has some microbatches

Backward adds the gradients of embedding, norm and head over pp, since all stages use these parameters.

`jaxpar.tick_loop` has the loop over ticks, which jax-explicit shares, and the legend.
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
    """Mean loss over the microbatches of a batch (M, b, ...); see `tick_loop.pipelined`."""
    return tick_loop.pipelined(
        parts,
        hooks,
        stages=stages,
        chunks=chunks,
        # spmd_axis_name adds pp to each constraint inside, for the dim of stages.
        over_stages=partial(jax.vmap, spmd_axis_name=AXIS),
        place=split_stages,
        # A collective permute: each device sends its state to the next one, between two ticks.
        roll=partial(jnp.roll, axis=0),
    )


def split_stages(tree: Any) -> Any:
    """Constrain the first dim of arrays (S, ...) to be split over pp; XLA chooses for the other dims."""

    def constrain(x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, P(AXIS, *(P.UNCONSTRAINED,) * (x.ndim - 1)))

    return jax.tree.map(constrain, tree)
