"""Pipeline parallelism by the compiler: stages are a dim of the arrays, and a roll along it moves data.

    tick        0     1     2     3     4        S = 2 stages, M = 4 microbatches
    stage 0     0     1     2     3     -        at a tick `vmap` runs every stage on its microbatch
    stage 1     -     0     1     2     3

    array, split over pp                    communication that XLA inserts
    blocks (S, ...)                         none: each device computes its stage
    x of each stage (S, b, T, C)            after each tick a roll by +1
    one slot of each stage (S, b, T, C)     after each tick a roll by -1
    embedding, norm and head: not split     in backward their gradients are added over pp

A roll along the split dim S is a collective permute between neighbours, and it wraps around. The loop is
`jaxpar.tick_loop`, with the legend. Each stage has K = M / S slots, rounded up. Microbatch m waits in slot m
// S of stage m % S, where it is embedded. At a tick stage 0 takes x from one slot, and all stages use that
number. After each tick the loop calls `roll` twice:

    x rolls by +1          the last stage's y arrives at stage 0
    stage 0 swaps          it puts a finished y into the slot, and takes the x that waits there
    the slot rolls by -1   the next x arrives at stage 0; y goes to stage S - 1 and further, to its loss

After S rolls a slot has passed all its x to stage 0. In their places are finished y, and the stage where a y
ends computes its loss. So no stage embeds all microbatches, or computes all losses. Autodiff reverses the
loop and each roll: all forwards run first, then all backwards, as in GPipe.
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
