"""Pipeline parallelism by the compiler: stages are a dim of the arrays, and a roll along it is the network.

    layers [S@pp, ...], x [S@pp, ...]    constrained to be split over pp
    a tick                               one function, `vmap`ped over stages: nothing moves
    the shift                            a roll by one: XLA makes a collective permute of it
    embedding, norm, head                on every stage, for its share of the microbatches

The loop over ticks is `jaxpar.stages.run_ticks`, which jax-explicit has, too; its legend holds here.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from compare.spec.axes import PP
from jaxpar.hooks import Hooks
from jaxpar.mlp import Routing
from jaxpar.model import Loss, PipelineParts
from jaxpar.stages import Tree, Turn, lanes, run_stage, run_ticks, shift
from jaxpar.weights import STACKED

AXIS = PP


def pipelined(parts: PipelineParts, hooks: Hooks, *, mesh: Mesh, chunks: int = 1) -> Loss:
    """The mean loss over a batch (M, b, ...) of a model whose stacked blocks are spread over stages.

    Blocks are in the order of the devices that have them (`Placement.pad`). They and their derivative must be
    finite on the embedding of any microbatch: idle stages compute on one, for nothing.
    """
    stages = mesh.shape[AXIS]
    over_stages = partial(jax.vmap, spmd_axis_name=AXIS)

    def loss(params: Tree, batch: Tree) -> tuple[jax.Array, Routing]:
        (count,) = {x.shape[0] for x in jax.tree.leaves(batch)}
        enters_SK, leaves_SK, counts_SK = lanes(count, stages)
        layers_SN = jax.tree.map(lambda w: w.reshape(stages, chunks, -1, *w.shape[1:]), params[STACKED])

        def of_stage(layers_N: Tree, x: jax.Array, turn: Turn) -> jax.Array:
            params_of_stage = {**params, STACKED: layers_N}
            return run_stage(parts, params_of_stage, batch, x, turn, hooks)

        def on_every_stage(piece: Callable[..., jax.Array], *of_microbatch: Any) -> jax.Array:
            return over_stages(jax.vmap(partial(piece, params)))(*of_microbatch)

        x_SK = on_every_stage(parts.embed, jax.tree.map(lambda x: x[enters_SK], batch))
        x_SK = run_ticks(
            lambda x_S, turn_S: over_stages(of_stage)(layers_SN, x_S, turn_S),
            x_SK,
            shift=partial(shift, partial(jnp.roll, axis=0)),
            placed=partial(placed, mesh=mesh),
            microbatches=count,
            chunks=chunks,
        )
        losses_SK = on_every_stage(parts.loss, x_SK, jax.tree.map(lambda x: x[leaves_SK], batch))
        return jnp.where(counts_SK, losses_SK, 0).sum() / count, Routing()

    return loss


def placed(x: jax.Array, *, mesh: Mesh) -> jax.Array:
    """Say that the first dim of x (S, ...) is split over pp; of the others nothing is said."""
    spec = P(AXIS, *(P.UNCONSTRAINED,) * (x.ndim - 1))
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
