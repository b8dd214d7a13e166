"""Pipeline parallelism by hand: devices have some of the blocks each, and microbatches pass through them.

All devices run one program, a scan over the ticks of a schedule. 1F1B with 2 devices and 2 microbatches:

    tick        0     1     2     3     4     5
    device 0    F0    F1    -     B0    -     B1
    device 1    -     F0    B0    F1    B1    -

    task        computes                                  after the tick
    forward F   y of a stage (`stage.Stage`)              y to the next device
    backward B  gradients of the stage's blocks, and dx   dx to the previous device

The first stage begins with the embedding. The backward of the last stage begins with the loss. Here y of F1
arrives after tick 1, and waits in a slot until tick 3. For each tick and device a table
(`compare.pipeline.ticks`) lists the task, the slots that it reads, and the slots for the arrivals.

Autodiff does not see the pipeline. Under layout.remat = full a device stores the inputs of its stages, and
backward computes their forward again. Under dots and none it stores the residuals of each forward.

In one program all devices have equal shapes. So each device has the parameters of the embedding and of the
loss, which only the end stages use. Their gradients are summed over pp once a step, so all copies stay equal.

Legend: M microbatches of a step, B sequences of a microbatch, T ticks, S slots, R ranks, v stages of a rank.
Sources: GPipe (arXiv 1811.06965), 1F1B (2006.09503), interleaved (2104.04473).
"""

from collections.abc import Callable
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
from jaxpar.comm.collectives import run_if
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
    """Sum the gradients of parameters that pp does not split once a step, after the ticks."""
    if experiment.layout.pp == 1:
        return Strategy()

    if remat_of(experiment.layout) == "full":  # a backward computes its forward again: once is enough
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
    """Mean loss, (), and this device's part of its gradients.

    Args:
        params: the blocks of this device, chunk after chunk, and all other parameters.
        batch: (M, B, ...), the same on all devices of pp.
        reduce: maps a microbatch's gradients, some keys at a time, to shards.
        like: a tree of the shapes of all reduced gradients.
    """

    def tick(carry: tuple[Any, ...], now: tuple[TickTasks, jax.Array, jax.Array]) -> tuple[Any, None]:
        """Run one task, then send activations forward and gradients backward."""
        inputs_S, gradients_S, residuals_S, sums = carry
        task, sends_activations, sends_gradients = now
        x, dy = inputs_S[task.input_slot], gradients_S[task.gradient_slot]

        # `run_if` is `lax.cond`. Its second argument, the predicate at all ticks, counts runs for the ledger.
        # In one switch over three kinds XLA would copy all sums in the branches that return them unchanged.
        idle = lambda task, x, residuals_S: (jnp.zeros_like(x), residuals_S)  # noqa: E731
        y, residuals_S = run_if(
            runs_forward(task), runs_forward(ticks.tasks), forward, idle, task, x, residuals_S
        )
        idle = lambda task, x, dy, residuals_S, sums: (jnp.zeros_like(x), sums)  # noqa: E731
        is_backward, runs_TR = task.kind == BACKWARD, ticks.tasks.kind == BACKWARD
        dx, sums = run_if(is_backward, runs_TR, backward, idle, task, x, dy, residuals_S, sums)

        # Send y to the next device, and receive the previous device's, if any device has a y to send.
        shift = partial(collectives.shift, axis=AXIS, by=1, purpose=ACTIVATIONS)
        y = run_if(sends_activations, ticks.sends_activations, shift, jnp.zeros_like, y)
        # Send dx to the previous device, and receive the next device's, if any device has a dx to send.
        shift = partial(collectives.shift, axis=AXIS, by=-1, purpose=ACTIVATION_GRADIENTS)
        dx = run_if(sends_gradients, ticks.sends_gradients, shift, jnp.zeros_like, dx)
        inputs_S = _put(inputs_S, y, task.arriving_input)
        return (inputs_S, _put(gradients_S, dx, task.arriving_gradient), residuals_S, sums), None

    def runs_forward(task: TickTasks) -> Any:
        """True for a forward, unless backward computes it: on the last stage, if no residuals are kept."""
        is_forward = task.kind == FORWARD
        return is_forward if ticks.kept_slots else is_forward & (task.stage < ticks.stages - 1)

    def forward(task: TickTasks, x: jax.Array, residuals_S: Any) -> tuple[jax.Array, Any]:
        """Output of the task's stage. Its residuals are stored in their slot."""
        y, residuals = stage_of(task).forward(x)
        return y, jax.tree.map(partial(_put, index=task.kept_slot), residuals_S, residuals)

    def backward(
        task: TickTasks, x: jax.Array, dy: jax.Array, residuals_S: Any, sums: Any
    ) -> tuple[jax.Array, Any]:
        """Gradient of the stage's input. Gradients of its parameters are added to the sums."""
        chunks, ends = sums
        residuals = jax.tree.map(lambda array_S: _at(array_S, task.kept_slot), residuals_S)
        dx, layers, ends = stage_of(task).backward(x, residuals, dy, ends)
        number = task.stage // ticks.ranks
        chunk = jax.tree.map(lambda x: _at(x, number), chunks)
        chunk = accumulate({STACKED: chunk}, {STACKED: layers})[STACKED]
        return dx, (jax.tree.map(partial(_put, index=number), chunks, chunk), ends)

    def accumulate(sums: Any, gradients: Any) -> Any:
        """Add a microbatch's gradients, reduced, to the sums."""
        return jax.tree.map(lax.add, sums, reduce(gradients))

    def stage_of(task: TickTasks) -> Stage:
        layers = jax.tree.map(lambda x: _at(x, task.stage // ticks.ranks), by_chunk(params[STACKED]))
        microbatch = jax.tree.map(lambda x: _at(x, task.microbatch), batch)
        return Stage(parts, ticks, task, {**params, STACKED: layers}, microbatch, accumulate)

    def by_chunk(layers: Any) -> Any:
        """Leaves (v layers of a stage, ...) -> (v, layers of a stage, ...)."""
        return jax.tree.map(lambda x: x.reshape(ticks.stages // ticks.ranks, -1, *x.shape[1:]), layers)

    tasks_T = jax.tree.map(lambda tasks_TR: jnp.asarray(tasks_TR)[:, lax.axis_index(AXIS)], ticks.tasks)
    # Trace one forward for the types of its results, with their varying axes. XLA removes the computation.
    stage = stage_of(jax.tree.map(lambda task_T: task_T[0], tasks_T))
    x = parts.embed(params, stage.batch)
    loss = parts.loss(params, x, stage.batch)
    zeros = jax.tree.map(jnp.zeros_like, like)
    start = (
        _slots(x, ticks.input_slots + 1),  # the last slot is for scratch
        _slots(x, ticks.gradient_slots + 1),
        _slots(stage.forward(x)[1], ticks.kept_slots) if ticks.kept_slots else (),
        (by_chunk(zeros[STACKED]), EndSums(jnp.zeros_like(loss), without_layers(zeros))),
    )
    sends_T = jnp.asarray(ticks.sends_activations), jnp.asarray(ticks.sends_gradients)
    *_, (chunks, ends) = lax.scan(tick, start, (tasks_T, *sends_T))[0]
    gradients = {**ends.gradients, STACKED: jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), chunks)}
    # The last device has the loss, and the others have 0: sum it over the devices of pp.
    loss = collectives.all_reduce(ends.loss, AXIS, purpose=LOSS)
    return loss / ticks.microbatches, jax.tree.map(lambda g: g / ticks.microbatches, gradients)


def _slots(tree: Any, count: int) -> Any:
    return jax.tree.map(lambda x: jnp.stack([jnp.zeros_like(x)] * count), tree)
