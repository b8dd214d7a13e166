"""Stages that are a dim of the arrays: the tick loop of the pipelines of jax-compiler and jax-explicit.

One array holds a microbatch for each stage, and pp splits its first dim. A tick is one function on all
stages, `vmap`ped; then a shift by one along that dim, the network. A scan over ticks is the pipeline. Its
derivative is the backward pipeline, in reverse: all forwards, then all backwards, as in GPipe; never 1F1B.
With several chunks a device has stages r, r + p, ..., and a microbatch goes round the ring as often.

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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.hooks import Hooks, identity
from jaxpar.model import PipelineParts
from jaxpar.remat import apply_remat
from jaxpar.weights import STACKED

Tree = Any


class Turn(NamedTuple):
    """One device's task at a tick: numbers of its chunk's turn, of its stage, and of the microbatch."""

    chunk: jax.Array
    stage: jax.Array
    microbatch: jax.Array


def run_ticks(
    all_stages: Callable[[jax.Array, Turn], jax.Array],
    x_SK: jax.Array,
    *,
    shift: Callable[[jax.Array, int], jax.Array],
    microbatches: int,
    chunks: int = 1,
    placed: Callable[[jax.Array], jax.Array] = identity,
) -> jax.Array:
    """Take microbatches through all stages: x_SK enters, and returns, as `lanes` says.

    `all_stages` is a tick of all devices; `shift` is that below; `placed` says that pp splits the first dim.
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
        x_SK = lax.dynamic_update_index_in_dim(x_SK, shift(lane_S, -1), lane, axis=1)
        return placed(x_S), placed(x_SK)

    def step(carry: tuple[jax.Array, jax.Array], tick: jax.Array):
        x_S, x_SK = carry
        begun_S = tick - stage_S  # negative, or beyond the last: the stage is idle
        chunk_S = begun_S // stages % chunks
        microbatch_S = begun_S // (stages * chunks) * stages + begun_S % stages
        turn_S = Turn(chunk_S, chunk_S * stages + stage_S, jnp.clip(microbatch_S, 0, microbatches - 1))
        return exchange(shift(all_stages(x_S, turn_S), 1), x_SK, tick + 1), None

    x_SK = placed(x_SK)
    # Idle stages begin with what each has anyway: from zeros a layer might make NaN, and 0 * NaN is NaN.
    start = exchange(lax.stop_gradient(x_SK[:, 0]), x_SK, 0)
    (_, x_SK), _ = lax.scan(step, start, jnp.arange(microbatches * chunks + stages - 1))
    return x_SK


@partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def shift(roll: Callable[[jax.Array, int], jax.Array], x_S: jax.Array, by: int) -> jax.Array:
    """Each stage's x becomes that of the stage `by` places before it, around the ring.

    Backward is written down: autodiff would derive it from slices, and XLA would move each of them.
    """
    return roll(x_S, by)


shift.defvjp(
    lambda roll, x_S, by: (roll(x_S, by), None),
    lambda roll, by, _, gradient_S: (shift(roll, gradient_S, -by),),
)


def lanes(microbatches: int, stages: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each place where microbatches wait, (S, K): which enters from it, which is in it in the end, if any.

    Places that have none name any.
    """
    count = -(-microbatches // stages)
    places_SK = np.arange(count * stages).reshape(count, stages).T
    enters_SK = places_SK % microbatches

    lane, place = np.divmod(np.arange(microbatches), stages)
    # The last lane, if it is short, has not rolled all the way round when its last microbatch is done.
    place = np.where(lane == count - 1, place - microbatches % -stages, place)
    leaves_SK, counts_SK = np.zeros_like(enters_SK), np.zeros_like(enters_SK, bool)
    leaves_SK[place, (lane + 1) % count] = np.arange(microbatches)
    counts_SK[place, (lane + 1) % count] = True
    return enters_SK, leaves_SK, counts_SK


def one_pass(batch: Tree, *, microbatches: int) -> Tree:
    """(A, B, ...) -> (1, M, b, ...): the microbatches of all accumulated passes, which share one schedule.

    One takes every M/A-th sequence: of a B that is split over devices each device keeps its own.
    """

    def cut(x_AB: jax.Array) -> jax.Array:
        passes, size, *rest = x_AB.shape
        x_AbM = x_AB.reshape(passes, size // microbatches, microbatches, *rest)
        return x_AbM.swapaxes(1, 2).reshape(passes * microbatches, size // microbatches, *rest)[None]

    return jax.tree.map(cut, batch)


def run_stage(
    parts: PipelineParts,
    params: Tree,
    batch: Tree,
    x: jax.Array,
    turn: Turn,
    hooks: Hooks,
) -> jax.Array:
    """A device's work at a tick: the blocks (N, L, ...) of the chunk whose turn it is, on x (b, T, C).

    `hooks.remat` says what forward may keep of a chunk that picks or gathers its layers; these last one tick.
    """
    is_gather = hooks.is_gather
    chunks, of_chunk = jax.tree.leaves(params[STACKED])[0].shape[:2]

    def run(layers: Tree, x: jax.Array, turn: Turn) -> jax.Array:
        microbatch = jax.tree.map(lambda x: x[turn.microbatch], batch)
        return parts.layers({**params, STACKED: layers}, x, microbatch, turn.stage * of_chunk)

    if chunks == 1 and is_gather is None:
        return run(jax.tree.map(lambda w_N: w_N[0], params[STACKED]), x, turn)

    # A lone chunk that gathers its layers is picked, too: JAX takes out of the loop what is the same at every
    # tick, and forward would gather all layers of a stage before it begins.
    def pick_and_run(layers_N: Tree, x: jax.Array, turn: Turn) -> jax.Array:
        pick = partial(lax.dynamic_index_in_dim, index=turn.chunk, keepdims=False)
        return run(jax.tree.map(pick, layers_N), x, turn)

    def is_copy(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
        """Makes a tick's copy of parameters, which is not to be kept: there would be one for each.

        `vmap` makes a gather of picking by an index. (A layer's own gathers are computed anew, no more.)
        """
        return primitive.name == "gather" or (
            is_gather is not None and is_gather(primitive, *arguments, **parameters)
        )

    return apply_remat(pick_and_run, hooks.remat, is_gather=is_copy)(params[STACKED], x, turn)
