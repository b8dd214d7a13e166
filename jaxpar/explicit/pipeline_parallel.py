"""Pipeline parallelism in types: pp splits the dim of stages, and the shift is left to the compiler.

    tick        0     1     2     3     4        S = 2 stages, M = 4 microbatches
    stage 0     0     1     2     3     -        at a tick `vmap` runs every stage on its microbatch
    stage 1     -     0     1     2     3

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

jax-compiler runs the same loop. The types differ:

    x [S@pp], blocks [S@pp]    `vmap` reads the axis from the types of its arguments
    embedding, norm, head      {R:pp}: equal on all devices of pp. Each stage has a copy, [S@pp]. The gradient
                               is {U:pp}, a partial sum: `data_parallel.sum_replicas` adds it once a step
    the batch                  each stage reads its own microbatch. An index that differs by stage into a
                               shared array is an error, so each stage has a copy, [S@pp]
    the roll                   no type moves the entries of a split dim: `auto_axes` leaves it to XLA
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import auto_axes, reshard

from compare.spec.axes import PP
from jaxpar import tick_loop
from jaxpar.explicit.sharding_types import vmap
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
        over_stages=vmap,
        place=split_stages,
        roll=roll,
        copy=lambda tree: jax.tree.map(partial(copy_to_stages, stages=stages), tree),
    )


def split_stages(tree: Any) -> Any:
    """Split the first dim of arrays (S, ...) over pp, as most are already; nothing is sent."""

    def split(x: jax.Array) -> jax.Array:
        _, *dims = jax.typeof(x).sharding.spec.partitions
        return reshard(x, P(AXIS, *dims))

    return jax.tree.map(split, tree)


def roll(x_S: jax.Array, by: int) -> jax.Array:
    """Roll x (S@pp, ...) along the stages."""
    spec = jax.typeof(x_S).sharding.spec
    # A collective permute between two ticks: +1 moves x to the next stage, -1 a slot towards stage 0.
    return auto_axes(lambda x_S: jnp.roll(x_S, by, axis=0), axes=AXIS, out_sharding=spec)(x_S)


def copy_to_stages(w: jax.Array, *, stages: int) -> jax.Array:
    """A copy (S@pp, ...) of w for each stage. Nothing is sent; the gradient of {R:pp} is {U:pp}."""
    return _copy_to_stages(w, stages, jax.typeof(w).sharding.spec)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _copy_to_stages(w: jax.Array, stages: int, spec: P) -> jax.Array:
    reduced = spec.reduced - {AXIS}
    copy = P(AXIS, *spec.partitions, reduced=reduced)
    w = reshard(w, P(*spec.partitions, reduced=reduced))
    return lax.broadcast_in_dim(w, (stages, *w.shape), range(1, w.ndim + 1), out_sharding=copy)


def _sum_copies(stages: int, spec: P, _: None, g_S: jax.Array) -> tuple[jax.Array]:
    return (lax.reduce_sum(g_S, (0,), out_sharding=P(*spec.partitions, unreduced=spec.reduced)),)


_copy_to_stages.defvjp(lambda w, *static: (_copy_to_stages(w, *static), None), _sum_copies)
