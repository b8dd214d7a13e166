"""Pipeline parallelism by hand: devices hold a share of the blocks each, and microbatches pass through them.

All devices run one program, a scan over the ticks of a schedule (`compare.pipeline.ticks`). At each tick a
device looks up its task, does it (a forward, a backward or nothing), and two permutes carry the results to
its neighbours:

    task        does                                       the ring carries
    forward     y of the stage (`stage.Stage`)             y, one place on
    backward    gradients of the blocks, summed; of x      x's gradient, one place back

Autodiff never sees the pipeline. Under layout.remat = full a device keeps the inputs of its stages, and
backward computes forward anew; under dots and none it keeps what backward needs. One program wants equal
shapes, so every device has all that pp does not split. Only the two ends use it; their gradients are summed
once a step, so that copies of a tied embedding stay equal. GPipe is arXiv 1811.06965, 1F1B 2006.09503,
interleaved 2104.04473.

Legend: M microbatches of a step, B sequences of one, T ticks, S slots, R ranks, v stages of a rank.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from compare.contract.communication import ACTIVATION_GRADIENTS, ACTIVATIONS, LOSS, TIED_GRADIENTS
from compare.pipeline.ticks import BACKWARD, FORWARD, Ticks, TickTasks
from compare.spec.axes import PP
from jaxpar.comm import collectives
from jaxpar.manual.stage import EndSums, Stage
from jaxpar.model import GPT
from jaxpar.placement import map_repeated
from jaxpar.problem import Pieces, Problem, without_layers
from jaxpar.remat import apply_remat
from jaxpar.step import Strategy
from jaxpar.weights import STACKED

AXIS = PP
_at = partial(lax.dynamic_index_in_dim, keepdims=False)


def strategy(problem: Problem, placements: Any) -> Strategy:
    """Gradients of what pp does not split stay each device's own in the ticks, and are summed once a step."""
    if problem.layout.pp == 1:
        return Strategy()

    def edit(model: GPT) -> None:
        if problem.remat == "full":  # a tick computes forward anew, and need not do so twice
            model.wrap_layer = partial(apply_remat, remat="dots")

    mark_varying = partial(collectives.to_varying, axis=AXIS)
    total = partial(collectives.all_reduce, axis=AXIS, purpose=TIED_GRADIENTS)
    return Strategy(
        edit,
        mark=partial(map_repeated, mark_varying, AXIS, placements),
        reduce=partial(map_repeated, total, AXIS, placements),
    )


def run_pipeline(
    pieces: Pieces,
    ticks: Ticks,
    params: Any,
    batch: Any,
    *,
    reduce: Callable[[Any], Any],
    like: Any,
) -> tuple[jax.Array, Any]:
    """Mean loss, and its gradients: of all but blocks what this device's stages contribute.

    `params` has this device's blocks, chunk after chunk; all else is marked as its own (`Strategy.mark`). The
    batch (M, B, ...) is the same on all devices of pp. `reduce` is applied to gradients of each microbatch
    before they accumulate, some keys at a time; they are then `like` this tree.
    """
    device = Device(pieces, ticks, params, batch, reduce)
    tasks_T = jax.tree.map(lambda tasks_TR: jnp.asarray(tasks_TR)[:, lax.axis_index(AXIS)], ticks.tasks)
    sends_T = jnp.asarray(ticks.sends_activations), jnp.asarray(ticks.sends_gradients)
    # For their types alone, the axes along which they vary included; XLA drops the numbers.
    stage = device.stage(jax.tree.map(lambda task_T: task_T[0], tasks_T))
    x = pieces.embed(params, stage.batch)
    loss = pieces.loss(params, x, stage.batch)
    zeros = jax.tree.map(jnp.zeros_like, like)
    carry = Carry(
        _slots(x, ticks.input_slots + 1),
        _slots(x, ticks.gradient_slots + 1),
        (device.by_chunk(zeros[STACKED]), EndSums(jnp.zeros_like(loss), without_layers(zeros))),
        _slots(stage.forward(x)[1], ticks.kept_slots) if ticks.kept_slots else (),
    )
    of_layers, ends = lax.scan(device.tick, carry, (tasks_T, *sends_T))[0].sums
    gradients = {**ends.gradients, STACKED: jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), of_layers)}
    loss = collectives.all_reduce(ends.loss, AXIS, purpose=LOSS)  # the last stage's; zero elsewhere
    return loss / ticks.microbatches, jax.tree.map(lambda g: g / ticks.microbatches, gradients)


class Carry(NamedTuple):
    """State of a device between two ticks; the last of the slots S is for scratch."""

    inputs_S: jax.Array
    gradients_S: jax.Array  # of stages' outputs
    sums: tuple[Any, EndSums]
    """Gradients of this device's blocks by chunk, leaves (v, layers of a stage, ...); and the ends'."""
    residuals_S: Any
    """`Residuals` of the forwards whose backward is to come; () if backward computes them anew."""


class Device(NamedTuple):
    """One device's part in the ticks. Arguments of `run_pipeline`."""

    pieces: Pieces
    ticks: Ticks
    params: Any
    batch: Any
    reduce: Callable[[Any], Any]

    def tick(self, carry: Carry, now: tuple[TickTasks, jax.Array, jax.Array]) -> tuple[Carry, None]:
        """Do the task, hand on its result, and store what arrives."""
        inputs_S, gradients_S, sums, residuals_S = carry
        task, sends_activations, sends_gradients = now
        x, g = inputs_S[task.input_slot], gradients_S[task.gradient_slot]
        # Not one switch over three: XLA would copy all sums whenever a branch passes them on as they are.
        idle = lambda task, x, residuals_S: (jnp.zeros_like(x), residuals_S)  # noqa: E731
        y, residuals_S = lax.cond(self.runs_forward(task), self.forward, idle, task, x, residuals_S)
        idle = lambda task, x, g, residuals_S, sums: (jnp.zeros_like(x), sums)  # noqa: E731
        of_x, sums = lax.cond(task.kind == BACKWARD, self.backward, idle, task, x, g, residuals_S, sums)
        from_previous = partial(collectives.shift, axis=AXIS, by=-1, purpose=ACTIVATIONS)
        from_next = partial(collectives.shift, axis=AXIS, by=1, purpose=ACTIVATION_GRADIENTS)
        # All devices agree on whether one of them sends.
        with self.runs(self.ticks.sends_activations.sum()):
            y = lax.cond(sends_activations, from_previous, jnp.zeros_like, y)
        with self.runs(self.ticks.sends_gradients.sum()):
            of_x = lax.cond(sends_gradients, from_next, jnp.zeros_like, of_x)
        inputs_S = lax.dynamic_update_index_in_dim(inputs_S, y, task.arriving_input, 0)
        gradients_S = lax.dynamic_update_index_in_dim(gradients_S, of_x, task.arriving_gradient, 0)
        return Carry(inputs_S, gradients_S, sums, residuals_S), None

    def forward(self, task: TickTasks, x: jax.Array, residuals_S: Any) -> tuple[jax.Array, Any]:
        """Output of the stage at work; its residuals go into their slot."""
        with self.runs(*self.runs_forward(self.ticks.tasks).sum(axis=0)):
            y, residuals = self.stage(task).forward(x)
            put = partial(lax.dynamic_update_index_in_dim, index=task.kept_slot, axis=0)
            return y, jax.tree.map(put, residuals_S, residuals)

    def backward(
        self, task: TickTasks, x: jax.Array, g: jax.Array, residuals_S: Any, sums: Any
    ) -> tuple[jax.Array, Any]:
        """The gradient of its input; those of its parameters accumulate."""
        of_chunks, ends = sums
        with self.runs(*(self.ticks.tasks.kind == BACKWARD).sum(axis=0)):
            residuals = jax.tree.map(lambda array_S: _at(array_S, task.kept_slot), residuals_S)
            of_x, of_layers, ends = self.stage(task).backward(x, residuals, g, ends)
            of_layers = self.reduce({STACKED: of_layers})[STACKED]
            chunk = task.stage // self.ticks.ranks
            total = add(jax.tree.map(lambda x: _at(x, chunk), of_chunks), of_layers)
            put = partial(lax.dynamic_update_index_in_dim, index=chunk, axis=0)
            return of_x, (jax.tree.map(put, of_chunks, total), ends)

    def runs_forward(self, task: TickTasks) -> Any:
        """Whether a task is a forward by itself: the last stage's may be the beginning of its backward."""
        is_forward = task.kind == FORWARD
        return is_forward if self.ticks.kept_slots else is_forward & (task.stage < self.ticks.stages - 1)

    def stage(self, task: TickTasks) -> Stage:
        """The stage and the microbatch that are next."""
        chunk, by_chunk = task.stage // self.ticks.ranks, self.by_chunk(self.params[STACKED])
        return Stage(
            self.pieces,
            self.ticks,
            task,
            layers=jax.tree.map(lambda x: _at(x, chunk), by_chunk),
            rest=without_layers(self.params),
            batch=jax.tree.map(lambda x: _at(x, task.microbatch), self.batch),
            accumulate=lambda total, gradients: add(total, self.reduce(gradients)),
        )

    def by_chunk(self, layers: Any) -> Any:
        """Leaves (v layers of a stage, ...) -> (v, layers of a stage, ...)."""
        shape = (self.ticks.stages // self.ticks.ranks, -1)
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), layers)

    def runs(self, *turns: int) -> AbstractContextManager:
        """A scope that tells the ledger at how many of the ticks its content runs, on each rank."""
        return collectives.turns_scope(turns, of=len(self.ticks.tasks.kind))


def add(total: Any, gradients: Any) -> Any:
    """Add a microbatch's gradients to those before it."""
    return jax.tree.map(lax.add, total, gradients)


def _slots(tree: Any, count: int) -> Any:
    return jax.tree.map(lambda x: jnp.stack([jnp.zeros_like(x)] * count), tree)
