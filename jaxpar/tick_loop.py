"""The tick loop of jax-compiler and jax-explicit: stages are a dim of the arrays, and a roll is the network.

One array `state` has a microbatch for each stage, and pp splits its first dim. At each tick, one function
runs on all stages (`vmap`). Then the state rolls by one stage. For S = 2 stages and M = 4 microbatches:

    tick        0     1     2     3     4
    stage 0     0     1     2     3     -
    stage 1     -     0     1     2     3

Autodiff reverses the scan over ticks: all forwards run first, then all backwards, as in GPipe. It cannot make
1F1B. With N chunks a device has stages r, r + S, ..., and each microbatch passes all devices N times.

Waiting microbatches are spread over the stages: each stage has K slots. Slot k rolls towards stage 0, which
reads its next input from it and writes a finished output back. So each stage embeds a share of the
microbatches and computes the logits of a share.

Sources: `spmd_pipeline` in JAX's shard_map notebook; GSPMD (arXiv 2105.04663, section 3.3); the order of
chunks is Megatron-LM's (arXiv 2104.04473, section 2.2).

Legend: A gradient accumulation, B batch, M microbatches, b sequences of a microbatch, T position, C n_embd. S
stages, one on each rank of pp; N chunks of a rank, L layers of a chunk; K = M/S slots, rounded up.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.hooks import Hooks
from jaxpar.mlp import Routing
from jaxpar.model import Loss, PipelineParts
from jaxpar.placement import split_dim
from jaxpar.remat import apply_remat
from jaxpar.weights import STACKED, without_layers

Place = Callable[[Any], Any]
Roll = Callable[[jax.Array, int], jax.Array]


class StageTask(NamedTuple):
    """Task of one rank at one tick: which of its chunks, which stage of the model, which microbatch."""

    chunk: jax.Array
    stage: jax.Array
    microbatch: jax.Array


def pipelined(
    parts: PipelineParts,
    hooks: Hooks,
    *,
    stages: int,
    chunks: int,
    over_stages: Callable[..., Any],
    place: Place,
    roll: Roll,
    copy: Callable[[Any], Any] | None = None,
) -> Loss:
    """Mean loss over a batch (M, b, ...) of a model whose stacked blocks are split over S stages.

    The blocks are in the order of `Placement.pad`. A block and its derivative must be finite on the embedding
    of any microbatch: an idle stage computes on one, and a NaN there would reach the gradients.

    Args:
        over_stages: `vmap` over a leading dim S.
        place: splits the leading dim S of arrays over pp.
        roll: roll(x_S, n) moves each entry by n stages.
        copy: gives each stage a copy of the batch, (S, M, ...). The parameters outside the blocks then have
            the dim S, too. With None all stages share one batch.
    """

    def loss(params: Any, batch: Any) -> tuple[jax.Array, Routing]:
        (microbatches,) = {x.shape[0] for x in jax.tree.leaves(batch)}
        source_SK, result_SK, is_valid_SK = microbatch_slots(microbatches, stages)
        layers_SN = jax.tree.map(lambda w: split_dim(w, 0, stages, chunks, -1), params[STACKED])
        if copy:
            params, batch = copy(without_layers(params)), copy(batch)
        params = {**params, STACKED: layers_SN}
        shared = 0 if copy else None
        axes = {name: 0 if name == STACKED else shared for name in params}

        def pick_microbatches(slots_SK: np.ndarray) -> Any:
            pick = over_stages(lambda batch, slots_K: _pick(batch, slots_K), in_axes=(shared, 0))
            return pick(batch, place(slots_SK))

        def on_slots(part: Callable[..., jax.Array], *x_SK: Any) -> jax.Array:
            per_slot = jax.vmap(part, in_axes=(None, *(0,) * len(x_SK)))
            return over_stages(per_slot, in_axes=(axes, *(0,) * len(x_SK)))(params, *x_SK)

        def run_stages(x_S: jax.Array, task_S: StageTask) -> jax.Array:
            run = over_stages(partial(run_chunk, parts, hooks), in_axes=(axes, shared, 0, 0))
            return run(params, batch, x_S, place(task_S))

        x_SK = on_slots(parts.embed, pick_microbatches(source_SK))
        x_SK = spmd_pipeline(
            run_stages, x_SK, place=place, roll=roll, microbatches=microbatches, chunks=chunks
        )
        losses_SK = on_slots(parts.loss, x_SK, pick_microbatches(result_SK))
        return jnp.where(is_valid_SK, losses_SK, 0).sum() / microbatches, Routing()

    return loss


def spmd_pipeline(
    run_stages: Callable[[jax.Array, StageTask], jax.Array],
    inputs_SK: jax.Array,
    *,
    place: Place,
    roll: Roll,
    microbatches: int,
    chunks: int,
) -> jax.Array:
    """Run microbatches through all stages; inputs and outputs are in the slots of `microbatch_slots`.

    `run_stages(state_S, task_S)` is one tick of all stages.
    """
    stages, slots = inputs_SK.shape[:2]
    stage_S = np.arange(stages)

    def swap(state_S: jax.Array, waiting_SK: jax.Array, tick: Any) -> tuple[jax.Array, jax.Array]:
        """Stage 0 writes a finished microbatch into the slot and reads the next one, if it starts one."""
        slot = tick // (stages * chunks) % slots
        slot_S = lax.dynamic_index_in_dim(waiting_SK, slot, axis=1, keepdims=False)
        starts_S = (stage_S == 0) & (tick // stages % chunks == 0)
        starts_S = starts_S.reshape(-1, *(1,) * (state_S.ndim - 1))
        state_S, slot_S = jnp.where(starts_S, slot_S, state_S), jnp.where(starts_S, state_S, slot_S)
        # Send the slot one stage back: stage 0 reads the slot of stage 1 at the next tick. After S rolls
        # without a start each slot is back at its stage.
        waiting_SK = lax.dynamic_update_index_in_dim(waiting_SK, shift(roll, slot_S, -1), slot, axis=1)
        return place(state_S), place(waiting_SK)

    def step(carry: tuple[jax.Array, jax.Array], tick: jax.Array):
        state_S, waiting_SK = carry
        start_S = tick - stage_S  # negative, or too large: the stage is idle
        chunk_S = start_S // stages % chunks
        microbatch_S = start_S // (stages * chunks) * stages + start_S % stages
        task_S = StageTask(chunk_S, chunk_S * stages + stage_S, jnp.clip(microbatch_S, 0, microbatches - 1))
        state_S = run_stages(state_S, task_S)
        # Send each output to the next stage.
        return swap(shift(roll, state_S, 1), waiting_SK, tick + 1), None

    waiting_SK = place(inputs_SK)
    # Idle stages start from an input: a layer may make NaN of zeros, and 0 * NaN is NaN.
    start = swap(lax.stop_gradient(waiting_SK[:, 0]), waiting_SK, 0)
    (_, outputs_SK), _ = lax.scan(step, start, jnp.arange(microbatches * chunks + stages - 1))
    return outputs_SK


@partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def shift(roll: Roll, x_S: jax.Array, by: int) -> jax.Array:
    """Move each stage's x by `by` stages around the ring.

    The derivative is written out: autodiff would make slices, and XLA would move each of them.
    """
    return roll(x_S, by)


shift.defvjp(
    lambda roll, x_S, by: (roll(x_S, by), None),
    lambda roll, by, _, gradient_S: (shift(roll, gradient_S, -by),),
)


def microbatch_slots(microbatches: int, stages: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each slot (S, K): the microbatch that starts there, the one that ends there, and if that is valid.

    A slot without a microbatch has any number.
    """
    count = -(-microbatches // stages)
    slots_SK = np.arange(count * stages).reshape(count, stages).T
    source_SK = slots_SK % microbatches

    slot, stage = np.divmod(np.arange(microbatches), stages)
    # The last slot, if not full, has not rolled around the whole ring when its last microbatch is done.
    stage = np.where(slot == count - 1, stage - microbatches % -stages, stage)
    result_SK, is_valid_SK = np.zeros_like(source_SK), np.zeros_like(source_SK, bool)
    result_SK[stage, (slot + 1) % count] = np.arange(microbatches)
    is_valid_SK[stage, (slot + 1) % count] = True
    return source_SK, result_SK, is_valid_SK


def to_microbatches(batch: Any, *, microbatches: int) -> Any:
    """(A, B, ...) -> (1, A M, b, ...): the microbatches of all A passes run in one schedule.

    Microbatch m has the sequences m, m + M, ...: if B is split over devices, each has its share of every one.
    """

    def split(x_AB: jax.Array) -> jax.Array:
        passes, size, *rest = x_AB.shape
        x_AbM = x_AB.reshape(passes, size // microbatches, microbatches, *rest)
        return x_AbM.swapaxes(1, 2).reshape(passes * microbatches, size // microbatches, *rest)[None]

    return jax.tree.map(split, batch)


def run_chunk(
    parts: PipelineParts, hooks: Hooks, params: Any, batch: Any, x: jax.Array, task: StageTask
) -> jax.Array:
    """The blocks of one chunk, out of (N, L, ...), on x (b, T, C).

    A chunk that is picked from several, or gathered by ZeRO, exists for one tick. Backward picks or gathers
    it again.
    """
    chunks, layers_of_chunk = jax.tree.leaves(params[STACKED])[0].shape[:2]

    def run(layers: Any, x: jax.Array, task: StageTask) -> jax.Array:
        microbatch, first = _pick(batch, task.microbatch), task.stage * layers_of_chunk
        return parts.layers({**params, STACKED: layers}, x, microbatch, first)

    if chunks == 1 and hooks.is_gather is None:
        return run(jax.tree.map(lambda w_N: w_N[0], params[STACKED]), x, task)

    # A single gathered chunk is picked, too. Otherwise JAX hoists its gather out of the loop, and all layers
    # of a stage are full before the first tick.
    def pick_and_run(layers_N: Any, x: jax.Array, task: StageTask) -> jax.Array:
        pick = partial(lax.dynamic_index_in_dim, index=task.chunk, keepdims=False)
        return run(jax.tree.map(pick, layers_N), x, task)

    def is_copy(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
        """True for a copy of parameters; the scan would store one for each tick.

        `vmap` turns the pick into a gather. The gathers of tokens and positions are computed again, too.
        """
        return primitive.name == "gather" or (
            hooks.is_gather is not None and hooks.is_gather(primitive, *arguments, **parameters)
        )

    return apply_remat(pick_and_run, hooks.remat, is_gather=is_copy)(params[STACKED], x, task)


def _pick(batch: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: x[index], batch)
