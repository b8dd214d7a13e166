"""Pipeline parallelism by the compiler: stages are a dim of the arrays, and a roll along it is the network.

One array holds a microbatch for each stage, and its first dim is split over pp. A tick is the same function
on all stages, `vmap`ped, and a roll by one, of which XLA makes a collective permute. A scan over ticks is the
pipeline. Its derivative, in reverse, is the backward pipeline: all forwards, then all backwards, as in GPipe.
Autodiff orders the backward, so there is no 1F1B. With several chunks a device has stages r, r + p, r + 2p,
..., and a microbatch goes round the ring as often.

Microbatches wait in lanes across the stages, one of each lane on each stage. A lane rolls towards stage 0,
which takes the next microbatch from it and puts a finished one in its place. So every stage embeds its share
of the microbatches, and makes its share of the logits, which no device ever has all of.

Sources: GSPMD (arXiv 2105.04663, section 3.3), praxis and MaxText for stages as a dim; Megatron-LM (arXiv
2104.04473, section 2.2) for the order in which microbatches go through chunks.

Legend: A gradient accumulation, B batch, M microbatches, S stages at work at once, one on each device of pp,
N chunks of each, L layers of a chunk, K = M/S lanes, rounded up; `...` is what a microbatch has: (b, T, C).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from compare.spec.axes import PP
from jaxpar.problem import Loss, Pieces
from jaxpar.remat import IsGather, Remat
from jaxpar.stages import Stage, Tree, Turn, lanes, make_stage, one_pass

AXIS = PP
__all__ = ["AXIS", "one_pass", "pipelined", "run_pipeline", "shift"]


def run_pipeline(
    stage: Stage,
    layers: Tree,
    x_SK: jax.Array,
    *,
    mesh: Mesh,
    microbatches: int,
    chunks: int = 1,
) -> jax.Array:
    """Take microbatches through all stages.

    Args:
        stage: a device's function at a tick, of its layers and a microbatch.
        layers: leaves (S N L, ...), as devices have them.
        x_SK: (S, K, ...), placed as `lanes` says: what enters.
        mesh: has an axis pp of S devices.
        microbatches: how many places of `x_SK` have one.
        chunks: N.

    Returns:
        (S, K, ...): what leaves, placed as `lanes` says.
    """
    stages, lanes = x_SK.shape[:2]
    layers_SN = jax.tree.map(lambda w: w.reshape(stages, chunks, -1, *w.shape[1:]), layers)
    stage_S = np.arange(stages)

    def placed(x: jax.Array) -> jax.Array:
        spec = P(AXIS, *(P.UNCONSTRAINED,) * (x.ndim - 1))
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def exchange(x_S: jax.Array, x_SK: jax.Array, tick: Any) -> tuple[jax.Array, jax.Array]:
        """The first stage takes a microbatch from the lane, and puts the one that it has in its place."""
        lane = tick // (stages * chunks) % lanes
        lane_S = lax.dynamic_index_in_dim(x_SK, lane, axis=1, keepdims=False)
        # Between its turns a lane rolls on: S times is none.
        takes_S = (stage_S == 0) & (tick // stages % chunks == 0)
        takes_S = takes_S.reshape(-1, *(1,) * (x_S.ndim - 1))
        x_S, lane_S = jnp.where(takes_S, lane_S, x_S), jnp.where(takes_S, x_S, lane_S)
        x_SK = lax.dynamic_update_index_in_dim(x_SK, shift(lane_S, -1), lane, axis=1)
        return placed(x_S), placed(x_SK)

    def step(carry: tuple[jax.Array, jax.Array], tick: jax.Array):
        x_S, x_SK = carry
        begun_S = tick - stage_S  # negative, or beyond the last: the stage is idle
        chunk_S = begun_S // stages % chunks
        microbatch_S = begun_S // (stages * chunks) * stages + begun_S % stages
        turn_S = Turn(chunk_S, chunk_S * stages + stage_S, jnp.clip(microbatch_S, 0, microbatches - 1))
        x_S = jax.vmap(stage, spmd_axis_name=AXIS)(layers_SN, x_S, turn_S)
        return exchange(shift(x_S, 1), x_SK, tick + 1), None

    x_SK = placed(x_SK)
    # Idle stages begin with what each has anyway: from zeros a layer might make NaN, and 0 * NaN is NaN.
    start = exchange(lax.stop_gradient(x_SK[:, 0]), x_SK, 0)
    (_, x_SK), _ = lax.scan(step, start, jnp.arange(microbatches * chunks + stages - 1))
    return x_SK


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def shift(x_S: jax.Array, by: int) -> jax.Array:
    """Each stage's x becomes that of the stage `by` places before it, around the ring.

    Backward is written down: autodiff would derive it from slices, and XLA would move each of them.
    """
    return jnp.roll(x_S, by, axis=0)


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
        loss(params, batch) of a batch (M, b, ...): the mean over all of it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import AxisType
        >>> from jaxpar.problem import Pieces
        >>> def layer(x, w):
        ...     return jnp.tanh(x @ w), None
        >>> pieces = Pieces(
        ...     embed=lambda params, batch: batch["x"] @ params["first"],
        ...     layers=lambda params, x, batch, first: jax.lax.scan(layer, x, params["blocks"])[0],
        ...     loss=lambda params, x, batch: jnp.square(x @ params["first"].T - batch["y"]).mean(),
        ... )
        >>> devices = jax.device_count()
        >>> mesh = jax.make_mesh((devices,), ("pp",), axis_types=(AxisType.Auto,))
        >>> loss = pipelined(pieces, mesh=mesh, stacked="blocks")
        >>> params = {"first": jnp.ones((4, 8)), "blocks": jnp.ones((2 * devices, 8, 8))}
        >>> batch = {"x": jnp.ones((6, 2, 4)), "y": jnp.zeros((6, 2, 4))}  # 6 microbatches of 2
        >>> value, gradients = jax.jit(jax.value_and_grad(loss))(params, batch)
    """
    stages = mesh.shape[AXIS]

    def loss(params: Tree, batch: Tree) -> jax.Array:
        (count,) = {x.shape[0] for x in jax.tree.leaves(batch)}
        if chunks > 1 and count % stages:
            raise ValueError(f"{count} microbatches for {stages} stages of {chunks} chunks: must divide")
        enters_SK, leaves_SK, counts_SK = lanes(count, stages)

        def on_every_stage(piece: Callable[..., jax.Array], *of_microbatch: Any) -> jax.Array:
            each = jax.vmap(jax.vmap(partial(piece, params)), spmd_axis_name=AXIS)
            return each(*of_microbatch)

        def chunk(layers: Tree, x: jax.Array, turn: Turn) -> jax.Array:
            one = jax.tree.map(lambda x: x[turn.microbatch], batch)
            first = turn.stage * jax.tree.leaves(layers)[0].shape[0]
            return pieces.layers({**params, stacked: layers}, x, one, first)

        stage = make_stage(chunk, chunks=chunks, remat=remat, is_gather=is_gather)
        x_SK = on_every_stage(pieces.embed, jax.tree.map(lambda x: x[enters_SK], batch))
        x_SK = run_pipeline(stage, params[stacked], x_SK, mesh=mesh, microbatches=count, chunks=chunks)
        losses_SK = on_every_stage(pieces.loss, x_SK, jax.tree.map(lambda x: x[leaves_SK], batch))
        return jnp.where(counts_SK, losses_SK, 0).sum() / count

    return loss
