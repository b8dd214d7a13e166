"""Pipeline parallelism in types: stages are a dim that pp splits, and one operation has no type: the shift.

The pipeline is that of jax-compiler: a microbatch for each stage in one array [S@pp, ...], a tick that is one
`vmap`ped function, a scan over ticks, whose derivative is the backward pipeline. What types say of it:

    x[S@pp], layers[S@pp]    `vmap` needs to be told of no axis: it reads it off its arguments
    embedding, norm, head    on every stage: {R:pp}, a copy for each [S@pp], gradients {U:pp}, summed once
    a microbatch by number   an index that differs by stage, into what all have: an error; so each has a copy
    the shift                a roll along a dim that is split: slices that no type can give to devices

So the shift alone is left to the compiler (`auto_axes`), its result's type being said: XLA makes a collective
permute of it, as in jax-compiler.

Legend: M microbatches, S stages at work at once, one on each device of pp, N chunks of each, L layers of a
chunk, K = M/S lanes, rounded up; `...` is what a microbatch has: (b, T, C).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, auto_axes, reshard
from jax.sharding import PartitionSpec as P

from compare.spec.axes import PP
from jaxpar.problem import Loss, Pieces
from jaxpar.remat import IsGather, Remat
from jaxpar.stages import Stage, Tree, Turn, lanes, make_stage, one_pass

AXIS = PP
BY_STAGE = P(AXIS)
__all__ = ["AXIS", "one_pass", "pipelined", "run_pipeline", "shift"]


def run_pipeline(
    stage: Stage, of_stages: Tree, x_SK: jax.Array, *, microbatches: int, chunks: int = 1
) -> jax.Array:
    """Take microbatches through all stages.

    Args:
        stage: a device's function at a tick, of its parts and a microbatch.
        of_stages: leaves (S@pp, ...): parameters and batch of each stage.
        x_SK: (S@pp, K, ...), placed as `lanes` says: what enters.
        microbatches: how many places of `x_SK` have one.
        chunks: N.

    Returns:
        (S@pp, K, ...): what leaves, placed as `lanes` says.
    """
    stages, lanes = x_SK.shape[:2]
    stage_S = np.arange(stages)

    def exchange(x_S: jax.Array, x_SK: jax.Array, tick: Any) -> tuple[jax.Array, jax.Array]:
        """The first stage takes a microbatch from the lane, and puts the one that it has in its place."""
        lane = tick // (stages * chunks) % lanes
        lane_S = lax.dynamic_index_in_dim(x_SK, lane, axis=1, keepdims=False)
        # Between its turns a lane rolls on: S times is none.
        takes_S = (stage_S == 0) & (tick // stages % chunks == 0)
        takes_S = takes_S.reshape(-1, *(1,) * (x_S.ndim - 1))
        x_S, lane_S = jnp.where(takes_S, lane_S, x_S), jnp.where(takes_S, x_S, lane_S)
        return x_S, lax.dynamic_update_index_in_dim(x_SK, shift(lane_S, -1), lane, axis=1)

    def step(carry: tuple[jax.Array, jax.Array], tick: jax.Array):
        x_S, x_SK = carry
        begun_S = tick - stage_S  # negative, or beyond the last: the stage is idle
        chunk_S = begun_S // stages % chunks
        microbatch_S = begun_S // (stages * chunks) * stages + begun_S % stages
        turn_S = Turn(chunk_S, chunk_S * stages + stage_S, jnp.clip(microbatch_S, 0, microbatches - 1))
        x_S = jax.vmap(stage)(of_stages, x_S, reshard(turn_S, BY_STAGE))
        return exchange(shift(x_S, 1), x_SK, tick + 1), None

    # Idle stages begin with what each has anyway: from zeros a layer might make NaN, and 0 * NaN is NaN.
    start = exchange(lax.stop_gradient(x_SK[:, 0]), x_SK, 0)
    (_, x_SK), _ = lax.scan(step, start, jnp.arange(microbatches * chunks + stages - 1))
    return x_SK


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def shift(x_S: jax.Array, by: int) -> jax.Array:
    """Each stage's x becomes that of the stage `by` places before it, around the ring: (S@pp, ...).

    Backward is written down: autodiff would derive it from slices, and XLA would move each of them.
    """
    where = jax.typeof(x_S).sharding.spec
    return auto_axes(lambda x_S: jnp.roll(x_S, by, axis=0), axes=AXIS, out_sharding=where)(x_S)


shift.defvjp(
    lambda x_S, by: (shift(x_S, by), None),
    lambda by, _, gradient_S: (shift(gradient_S, -by),),
)


def pipelined(
    pieces: Pieces,
    *,
    mesh: Mesh,
    stacked: str,
    chunks: int = 1,
    remat: Remat = "none",
    is_gather: IsGather | None = None,
) -> Loss:
    """The loss of a model whose stacked layers are spread over the stages of a pipeline.

    Args:
        pieces: the model. `pieces.layers` sees the layers of one chunk; it must be finite, and so must its
            derivative, on the embedding of any microbatch: idle stages compute on one, for nothing.
        mesh: has an axis pp.
        stacked: the key of the parameters whose leaves stack layers, in the order of the devices that have
            them: device r's chunks r, r + p, ... one after the other (`Placement.pad`).
        chunks: stages of each device. If more than 1, pp must divide the microbatches.
        remat: what forward may keep of a chunk (`jaxpar.remat`), if it picks or gathers its layers.
        is_gather: tells operations that gather layers: their results last one tick.

    Returns:
        loss(params, batch) of a batch (M, b, ...): the mean over all of it. Parameters that are not stacked
        are (S@pp, ...), a copy for each stage.
    """
    stages = mesh.shape[AXIS]

    def loss(params: Tree, batch: Tree) -> jax.Array:
        (count,) = {x.shape[0] for x in jax.tree.leaves(batch)}
        if chunks > 1 and count % stages:
            raise ValueError(f"{count} microbatches for {stages} stages of {chunks} chunks: must divide")
        enters_SK, leaves_SK, counts_SK = lanes(count, stages)
        layers_SN = jax.tree.map(lambda w: w.reshape(stages, chunks, -1, *w.shape[1:]), params[stacked])
        params_S = {**params, stacked: layers_SN}
        batch_S = jax.tree.map(partial(_on_each_stage, stages=stages), batch)

        def on_every_stage(piece: Callable[..., jax.Array], *of_microbatch: Any) -> jax.Array:
            lanes_of = jax.vmap(piece, in_axes=(None, *(0,) * len(of_microbatch)))
            return jax.vmap(lanes_of)(params_S, *of_microbatch)

        def placed(places_SK: np.ndarray) -> Tree:
            pick = jax.vmap(lambda x, places_K: x[places_K])
            return jax.tree.map(lambda x_S: pick(x_S, reshard(places_SK, BY_STAGE)), batch_S)

        def stage(of_stage: tuple[Tree, Tree], x: jax.Array, turn: Turn) -> jax.Array:
            own, batch = of_stage

            def chunk(layers: Tree, x: jax.Array, turn: Turn) -> jax.Array:
                one = jax.tree.map(lambda x: x[turn.microbatch], batch)
                first = turn.stage * jax.tree.leaves(layers)[0].shape[0]
                return pieces.layers({**own, stacked: layers}, x, one, first)

            return make_stage(chunk, chunks=chunks, remat=remat, is_gather=is_gather)(own[stacked], x, turn)

        x_SK = on_every_stage(pieces.embed, placed(enters_SK))
        x_SK = run_pipeline(stage, (params_S, batch_S), x_SK, microbatches=count, chunks=chunks)
        losses_SK = on_every_stage(pieces.loss, x_SK, placed(leaves_SK))
        return jnp.where(counts_SK, losses_SK, 0).sum() / count

    return loss


def _on_each_stage(x: jax.Array, stages: int) -> jax.Array:
    """(...) -> (S@pp, ...): what each stage has anyway, as its entry of a dim."""
    return jnp.broadcast_to(x, (stages, *x.shape), out_sharding=P(AXIS, *jax.typeof(x).sharding.spec))
