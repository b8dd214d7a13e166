"""Pipeline parallelism in types: stages are a dim that pp splits, and one operation has no type: the shift.

The loop over ticks is that of jax-compiler (`jaxpar.stages`, whose legend holds here). What types say of it:

    x[S@pp], layers[S@pp]    `vmap` needs to be told of no axis: it reads it off its arguments
    embedding, norm, head    on every stage: {R:pp}, a copy for each [S@pp], gradients {U:pp}, summed once
    a microbatch by number   an index that differs by stage, into what all have: an error; so each has a copy
    the shift                a roll along a dim that is split: slices that no type can give to devices

So the shift alone is left to the compiler (`auto_axes`), its result's type being said: XLA makes a collective
permute of it, as in jax-compiler.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, auto_axes, reshard
from jax.sharding import PartitionSpec as P

from compare.spec.axes import PP
from jaxpar.hooks import Hooks
from jaxpar.mlp import Routing
from jaxpar.model import Loss, PipelineParts
from jaxpar.placement import split_dim
from jaxpar.stages import Tree, Turn, lanes, run_stage, run_ticks, shift
from jaxpar.weights import STACKED

AXIS = PP
BY_STAGE = P(AXIS)


def pipelined(parts: PipelineParts, hooks: Hooks, *, mesh: Mesh, chunks: int = 1) -> Loss:
    """The loss of a model whose stacked blocks are spread over the stages of a pipeline.

    As of jax-compiler. Parameters that are in no block are (S@pp, ...), a copy for each stage.
    """
    stages = mesh.shape[AXIS]

    def loss(params: Tree, batch: Tree) -> tuple[jax.Array, Routing]:
        (count,) = {x.shape[0] for x in jax.tree.leaves(batch)}
        enters_SK, leaves_SK, counts_SK = lanes(count, stages)
        layers_SN = jax.tree.map(lambda w: split_dim(w, 0, stages, chunks, -1), params[STACKED])
        params_S = {**params, STACKED: layers_SN}
        batch_S = jax.tree.map(  # what each stage has anyway, as its entry of a dim
            lambda x: jnp.broadcast_to(
                x, (stages, *x.shape), out_sharding=P(AXIS, *jax.typeof(x).sharding.spec)
            ),
            batch,
        )

        def of_stage(params: Tree, batch: Tree, x: jax.Array, turn: Turn) -> jax.Array:
            return run_stage(parts, params, batch, x, turn, hooks)

        def on_every_stage(piece: Callable[..., jax.Array], *of_microbatch: Any) -> jax.Array:
            of_lanes = jax.vmap(piece, in_axes=(None, *(0,) * len(of_microbatch)))
            return jax.vmap(of_lanes)(params_S, *of_microbatch)

        def placed(places_SK: np.ndarray) -> Tree:
            pick = jax.vmap(lambda x, places_K: x[places_K])
            return jax.tree.map(lambda x_S: pick(x_S, reshard(places_SK, BY_STAGE)), batch_S)

        x_SK = on_every_stage(parts.embed, placed(enters_SK))
        x_SK = run_ticks(
            lambda x_S, turn_S: jax.vmap(of_stage)(params_S, batch_S, x_S, reshard(turn_S, BY_STAGE)),
            x_SK,
            shift=partial(shift, roll),
            microbatches=count,
            chunks=chunks,
        )
        losses_SK = on_every_stage(parts.loss, x_SK, placed(leaves_SK))
        return jnp.where(counts_SK, losses_SK, 0).sum() / count, Routing()

    return loss


def roll(x_S: jax.Array, by: int) -> jax.Array:
    """A roll along the stages (S@pp, ...), with its result's type."""
    where = jax.typeof(x_S).sharding.spec
    return auto_axes(lambda x_S: jnp.roll(x_S, by, axis=0), axes=AXIS, out_sharding=where)(x_S)
