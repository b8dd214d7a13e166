"""Pipeline parallelism by hand: devices hold a share of the blocks each, and microbatches pass through them.

All devices run one program, a scan over the ticks of a schedule (`compare.pipeline.ticks`). At each tick a
device looks up its task, does it (a forward, a backward or nothing), and two permutes carry the results to
its neighbours:

    task        does                                       the ring carries
    forward     y of the stage (`stage.Stage`)             y, one place on
    backward    gradients of the blocks, summed; of x      x's gradient, one place back

Autodiff never sees the pipeline. Under layout.remat = full a device keeps the inputs of its stages, and
backward computes forward anew; under dots and none it keeps what backward needs. One program wants equal
shapes: every device has what only the two ends use, whose gradients are summed once a step, so that copies of
a tied embedding stay equal. GPipe is arXiv 1811.06965, 1F1B 2006.09503, interleaved 2104.04473.

Legend: M microbatches of a step, B sequences of one, T ticks, S slots, R ranks, v stages of a rank.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from compare.contract.communication import ACTIVATION_GRADIENTS, ACTIVATIONS, LOSS, TIED_GRADIENTS
from compare.pipeline.ticks import BACKWARD, FORWARD, Ticks, TickTasks
from compare.spec.axes import PP
from compare.spec.experiment import Experiment
from jaxpar.comm import collectives
from jaxpar.hooks import Hooks
from jaxpar.manual.stage import EndSums, Stage
from jaxpar.manual.strategy import Strategy
from jaxpar.model import PipelineParts
from jaxpar.placement import map_repeated
from jaxpar.remat import remat_of
from jaxpar.weights import STACKED, without_layers

AXIS = PP
_at = partial(lax.dynamic_index_in_dim, keepdims=False)
_put = partial(lax.dynamic_update_index_in_dim, axis=0)


def strategy(experiment: Experiment, placements: Any, hooks: Hooks) -> Strategy:
    """Gradients of what pp does not split stay each device's own in the ticks, and are summed once a step."""
    if experiment.layout.pp == 1:
        return Strategy()

    if remat_of(experiment.layout) == "full":  # a tick computes forward again, which need not happen twice
        hooks.remat = "dots"
    mark_varying = partial(collectives.to_varying, axis=AXIS)
    total = partial(collectives.all_reduce, axis=AXIS, purpose=TIED_GRADIENTS)
    return Strategy(
        mark=partial(map_repeated, mark_varying, AXIS, placements),
        reduce=partial(map_repeated, total, AXIS, placements),
    )


def run_pipeline(
    parts: PipelineParts, ticks: Ticks, params: Any, batch: Any, *, reduce: Callable[[Any], Any], like: Any
) -> tuple[jax.Array, Any]:
    """Mean loss, and its gradients: of all but blocks what this device's stages contribute.

    `params` has this device's blocks, chunk after chunk. The batch (M, B, ...) is the same on all devices of
    pp. `reduce` is applied to gradients of a microbatch, some keys at a time; they are then `like` this tree.
    """

    def by_chunk(layers: Any) -> Any:
        """Leaves (v layers of a stage, ...) -> (v, layers of a stage, ...)."""
        return jax.tree.map(lambda x: x.reshape(ticks.stages // ticks.ranks, -1, *x.shape[1:]), layers)

    def stage_of(task: TickTasks) -> Stage:
        layers = jax.tree.map(lambda x: _at(x, task.stage // ticks.ranks), by_chunk(params[STACKED]))
        return Stage(
            parts,
            ticks,
            task,
            params={**params, STACKED: layers},
            batch=jax.tree.map(lambda x: _at(x, task.microbatch), batch),
            accumulate=lambda total, gradients: add(total, reduce(gradients)),
        )

    def runs(*turns: int) -> AbstractContextManager:
        """A scope that tells the ledger at how many of the ticks its content runs, on each rank."""
        return collectives.turns_scope(turns, of=len(ticks.tasks.kind))

    def runs_forward(task: TickTasks) -> Any:
        """Whether a task is a forward by itself: the last stage's may be the beginning of its backward."""
        is_forward = task.kind == FORWARD
        return is_forward if ticks.kept_slots else is_forward & (task.stage < ticks.stages - 1)

    def forward(task: TickTasks, x: jax.Array, residuals_S: Any) -> tuple[jax.Array, Any]:
        """Output of the stage at work; its residuals go into their slot."""
        with runs(*runs_forward(ticks.tasks).sum(axis=0)):
            y, residuals = stage_of(task).forward(x)
            return y, jax.tree.map(partial(_put, index=task.kept_slot), residuals_S, residuals)

    def backward(
        task: TickTasks, x: jax.Array, g: jax.Array, residuals_S: Any, sums: Any
    ) -> tuple[jax.Array, Any]:
        """The gradient of the stage's input; those of its parameters accumulate."""
        of_chunks, ends = sums
        with runs(*(ticks.tasks.kind == BACKWARD).sum(axis=0)):
            residuals = jax.tree.map(lambda array_S: _at(array_S, task.kept_slot), residuals_S)
            of_x, of_layers, ends = stage_of(task).backward(x, residuals, g, ends)
            of_layers, chunk = reduce({STACKED: of_layers})[STACKED], task.stage // ticks.ranks
            total = add(jax.tree.map(lambda x: _at(x, chunk), of_chunks), of_layers)
            return of_x, (jax.tree.map(partial(_put, index=chunk), of_chunks, total), ends)

    def tick(carry: tuple[Any, ...], now: tuple[TickTasks, jax.Array, jax.Array]) -> tuple[Any, None]:
        """Do the task, hand on its result, and store what arrives."""
        inputs_S, gradients_S, residuals_S, sums = carry
        task, sends_activations, sends_gradients = now
        x, g = inputs_S[task.input_slot], gradients_S[task.gradient_slot]
        # Not one switch over three: XLA would copy all sums whenever a branch passes them on as they are.
        idle = lambda task, x, residuals_S: (jnp.zeros_like(x), residuals_S)  # noqa: E731
        y, residuals_S = lax.cond(runs_forward(task), forward, idle, task, x, residuals_S)
        idle = lambda task, x, g, residuals_S, sums: (jnp.zeros_like(x), sums)  # noqa: E731
        of_x, sums = lax.cond(task.kind == BACKWARD, backward, idle, task, x, g, residuals_S, sums)
        from_previous = partial(collectives.shift, axis=AXIS, by=-1, purpose=ACTIVATIONS)
        from_next = partial(collectives.shift, axis=AXIS, by=1, purpose=ACTIVATION_GRADIENTS)
        # All devices agree on whether one of them sends.
        with runs(ticks.sends_activations.sum()):
            y = lax.cond(sends_activations, from_previous, jnp.zeros_like, y)
        with runs(ticks.sends_gradients.sum()):
            of_x = lax.cond(sends_gradients, from_next, jnp.zeros_like, of_x)
        inputs_S = _put(inputs_S, y, task.arriving_input)
        return (inputs_S, _put(gradients_S, of_x, task.arriving_gradient), residuals_S, sums), None

    tasks_T = jax.tree.map(lambda tasks_TR: jnp.asarray(tasks_TR)[:, lax.axis_index(AXIS)], ticks.tasks)
    # For their types alone, the axes along which they vary included; XLA drops the numbers.
    stage = stage_of(jax.tree.map(lambda task_T: task_T[0], tasks_T))
    x = parts.embed(params, stage.batch)
    loss = parts.loss(params, x, stage.batch)
    zeros = jax.tree.map(jnp.zeros_like, like)
    start = (
        _slots(x, ticks.input_slots + 1),  # the last slot is for scratch
        _slots(x, ticks.gradient_slots + 1),  # of stages' outputs
        _slots(stage.forward(x)[1], ticks.kept_slots) if ticks.kept_slots else (),
        # Sums of this device's blocks by chunk, leaves (v, layers of a stage, ...); and the ends'.
        (by_chunk(zeros[STACKED]), EndSums(jnp.zeros_like(loss), without_layers(zeros))),
    )
    sends_T = jnp.asarray(ticks.sends_activations), jnp.asarray(ticks.sends_gradients)
    *_, (of_layers, ends) = lax.scan(tick, start, (tasks_T, *sends_T))[0]
    gradients = {**ends.gradients, STACKED: jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), of_layers)}
    loss = collectives.all_reduce(ends.loss, AXIS, purpose=LOSS)  # the last stage's; zero elsewhere
    return loss / ticks.microbatches, jax.tree.map(lambda g: g / ticks.microbatches, gradients)


def add(total: Any, gradients: Any) -> Any:
    """Add a microbatch's gradients to those before it."""
    return jax.tree.map(lax.add, total, gradients)


def _slots(tree: Any, count: int) -> Any:
    return jax.tree.map(lambda x: jnp.stack([jnp.zeros_like(x)] * count), tree)
