"""Pipeline parallelism by the compiler: stages are a dim of the arrays, and a roll along it moves data.

    tick        0     1     2     3     4        S = 2 stages, M = 4 microbatches
    stage 0     0     1     2     3     -        at a tick `vmap` runs every stage on its microbatch
    stage 1     -     0     1     2     3

    array                                  communication that XLA inserts
    blocks [S@pp, ...]                     none: each device computes its stage
    x of each stage [S@pp, b, T, C]        after a tick a roll by +1: the next stage runs it at the next tick
    a slot of waiting x [S@pp, b, T, C]    after a tick a roll by -1, towards stage 0, which takes its next
                                           input from the slot and writes a finished output into it
    embedding, norm and head               in backward their gradients are added over pp

pp splits a dim of length S, so a roll by one is a collective permute between neighbours. Each stage embeds
the microbatches that wait in its slots, and computes the loss of the finished microbatches there. Autodiff
reverses the loop and each roll: all forwards run first, then all backwards, as in GPipe.

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
        # A collective permute between two ticks: +1 moves x to the next stage, -1 a slot towards stage 0.
        roll=partial(jnp.roll, axis=0),
    )


def split_stages(tree: Any) -> Any:
    """Constrain the first dim of arrays (S, ...) to be split over pp; XLA chooses for the other dims."""

    def constrain(x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, P(AXIS, *(P.UNCONSTRAINED,) * (x.ndim - 1)))

    return jax.tree.map(constrain, tree)
