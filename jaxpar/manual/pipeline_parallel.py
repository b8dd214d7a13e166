"""Pipeline parallelism by hand: devices hold a share of the layers each, and microbatches pass through them.

All devices run one program, a scan over the ticks of a schedule (`compare.pipeline.ticks`). At each tick a
device looks up its task, does it (a forward, a backward or nothing, in a `lax.cond`), and two permutes carry
the results to its neighbours: activations one place on, gradients one place back.

Autodiff never sees the pipeline: a backward is a task like a forward, written out in `pipeline.stage`. Under
layout.remat = full a device keeps the inputs of its stages, and backward computes their forward anew; under
dots and none it keeps what backward needs. One program wants equal shapes, so every device has all that pp
does not split (embeddings, the last norm). Only the two ends use it; their gradients are summed once a step,
so copies of a tied embedding stay equal.

Sources: GPipe (arXiv 1811.06965), 1F1B (2006.09503), interleaved (2104.04473).
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
from jaxpar.manual.pipeline.stage import EndSums, Stage
from jaxpar.placement import map_repeated
from jaxpar.problem import Pieces
from jaxpar.remat import Remat, apply_remat

AXIS = PP
WITHIN_A_TICK: Remat = "dots"
"""Activations that a stage's forward keeps until its backward in the same tick: enough not to compute matrix
products a third time. They are of one microbatch, and gone at the end of the tick."""


def run_pipeline(
    pieces: Pieces,
    ticks: Ticks,
    params: Any,
    batch: Any,
    *,
    stacked: str = "blocks",
    reduce: Callable[[Any], Any] = lambda gradients: gradients,
    like: Any = None,
) -> tuple[jax.Array, Any]:
    """Mean loss and its gradients over the microbatches of a batch, by all devices of pp together.

    Args:
        pieces: the model.
        ticks: `lock_step` of the schedule.
        params: a dict; the leaves under `stacked` are this device's layers, chunk after chunk, and all
            others are marked as its own (`mark_varying`).
        batch: a pytree of arrays (M, B, ...), the same on all devices of pp.
        stacked: the key of the stacked layers.
        reduce: applied to the gradients of each microbatch before they accumulate: to a dict that has some
            of the keys of `params`.
        like: a pytree like the reduced gradients of all of `params`; these by default.

    Returns:
        The loss, on all devices; and gradients as `reduce` leaves them: means over M, of the layers this
        device's, of all else what this device's stages contribute.

    Raises:
        ValueError: the schedule is for another number of devices or microbatches.

    Example, inside `shard_map`; the stacked leaves are in the order of the devices (`jaxpar.placement`):

        def layer(x, w):
            return jnp.tanh(x @ w), None

        pieces = Pieces(
            embed=lambda params, batch: batch["x"] @ params["embedding"],
            layers=lambda params, x, batch, first: lax.scan(layer, x, params["blocks"])[0],
            loss=lambda params, x, batch: jnp.square(x @ params["embedding"].T - batch["y"]).mean(),
        )
        ticks = lock_step(make_schedule("1f1b", ranks=4, microbatches=8))

        def gradients_of(params, batch):                # batch: {"x": (M, B, in), "y": (M, B, in)}
            local = mark_varying(params, placements)
            value, gradients = run_pipeline(pieces, ticks, local, batch)
            return value, sum_tied_gradients(gradients, placements)

        specs = {"embedding": P(), "blocks": P("pp")}
        step = jax.jit(per_device(gradients_of, mesh=mesh, in_specs=(specs, P()), out_specs=(P(), specs)))
    """
    (count,) = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
    devices = collectives.axis_size(AXIS)
    if (ticks.ranks, ticks.microbatches) != (devices, count):
        raise ValueError(
            f"a schedule of {ticks.ranks} ranks and {ticks.microbatches} microbatches, for {devices} devices "
            f"and {count} microbatches"
        )
    device = _Device(pieces, ticks, params, batch, stacked, reduce)
    tasks_T = jax.tree.map(lambda tasks_TR: jnp.asarray(tasks_TR)[:, lax.axis_index(AXIS)], ticks.tasks)
    sends_T = jnp.asarray(ticks.sends_activations), jnp.asarray(ticks.sends_gradients)
    zeros = jax.tree.map(jnp.zeros_like, params if like is None else like)
    carry = device.initial_carry(jax.tree.map(lambda x: x[0], tasks_T), zeros)
    of_layers, ends = lax.scan(device.step, carry, (tasks_T, *sends_T))[0].sums
    gradients = {**ends.gradients, stacked: jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), of_layers)}
    loss = collectives.all_reduce(ends.loss, AXIS, purpose=LOSS)  # the last stage's; zero elsewhere
    return loss / count, jax.tree.map(lambda g: g / count, gradients)


class Carry(NamedTuple):
    """State of a device between two ticks."""

    inputs_S: jax.Array
    """Inputs of stages, and last the scratch slot."""
    gradients_S: jax.Array
    """Gradients of stages' outputs, and last the scratch slot."""
    sums: tuple[Any, EndSums]
    """Gradients of this device's layers by chunk, leaves (v, layers of a stage, ...); and the ends'."""
    kept_S: Any
    """`Residuals` of the forwards whose backward is to come; () if backward computes them anew."""


class _Device(NamedTuple):
    """One device's part in the ticks. Arguments of `run_pipeline`."""

    pieces: Pieces
    ticks: Ticks
    params: Any
    batch: Any
    stacked: str
    reduce: Callable[[Any], Any]

    def initial_carry(self, task: TickTasks, zeros: Any) -> Carry:
        """Empty slots, and sums of zero; given the first tick's task, and zeros like gradients."""
        stage = self.stage(task)
        # For their types alone, the axes along which they vary included; XLA drops the numbers.
        x = self.pieces.embed(stage.params(stage.rest), stage.batch)
        loss = self.pieces.loss(stage.params(stage.rest), x, stage.batch)
        zero_rest = {key: zeros[key] for key in zeros if key != self.stacked}
        return Carry(
            jnp.stack([jnp.zeros_like(x)] * (self.ticks.input_slots + 1)),
            jnp.stack([jnp.zeros_like(x)] * (self.ticks.gradient_slots + 1)),
            (self.by_chunk(zeros[self.stacked]), EndSums(jnp.zeros_like(loss), zero_rest)),
            self.empty_kept(stage, x),
        )

    def empty_kept(self, stage: Stage, x: jax.Array) -> Any:
        """Slots for what forwards keep; () without any."""
        if not self.ticks.kept_slots:
            return ()
        return jax.tree.map(
            lambda array: jnp.stack([jnp.zeros_like(array)] * self.ticks.kept_slots), stage.forward_keeping(x)
        )

    def step(self, carry: Carry, now: tuple[TickTasks, jax.Array, jax.Array]) -> tuple[Carry, None]:
        """One tick: do the task, hand on its result, and store what arrives."""
        inputs_S, gradients_S, sums, kept_S = carry
        task, sends_activations, sends_gradients = now
        x, g = inputs_S[task.input_slot], gradients_S[task.gradient_slot]
        # Not one switch over three: XLA would copy all sums whenever a branch passes them on as they are.
        runs_forward = self.runs_forward(task)
        y, kept_S = lax.cond(
            runs_forward,
            self.forward,
            lambda task, x, kept_S: (jnp.zeros_like(x), kept_S),
            *(task, x, kept_S),
        )
        of_x, sums = lax.cond(
            task.kind == BACKWARD,
            self.backward,
            lambda task, x, g, kept_S, sums: (jnp.zeros_like(x), sums),
            *(task, x, g, kept_S, sums),
        )
        from_previous = partial(collectives.shift, axis=AXIS, by=-1, purpose=ACTIVATIONS)
        from_next = partial(collectives.shift, axis=AXIS, by=1, purpose=ACTIVATION_GRADIENTS)
        # All devices agree on whether one of them sends.
        with self.turns_scope(self.ticks.sends_activations.sum()):
            y = lax.cond(sends_activations, from_previous, jnp.zeros_like, y)
        with self.turns_scope(self.ticks.sends_gradients.sum()):
            of_x = lax.cond(sends_gradients, from_next, jnp.zeros_like, of_x)
        inputs_S = lax.dynamic_update_index_in_dim(inputs_S, y, task.arriving_input, 0)
        gradients_S = lax.dynamic_update_index_in_dim(gradients_S, of_x, task.arriving_gradient, 0)
        return Carry(inputs_S, gradients_S, sums, kept_S), None

    def runs_forward(self, task: TickTasks) -> Any:
        """Whether a task is a forward by itself: the last stage's may be the beginning of its backward."""
        is_forward = task.kind == FORWARD
        return is_forward if self.ticks.kept_slots else is_forward & (task.stage < self.ticks.stages - 1)

    def forward(self, task: TickTasks, x: jax.Array, kept_S: Any) -> tuple[jax.Array, Any]:
        """Output of the stage at work, shaped as its input; its residuals go into their slot."""
        with self.turns_scope(*self.runs_forward(self.ticks.tasks).sum(axis=0)):
            if not self.ticks.kept_slots:
                return self.stage(task).forward(x), kept_S
            kept = self.stage(task).forward_keeping(x)
            put = partial(lax.dynamic_update_index_in_dim, index=task.kept_slot, axis=0)
            return kept.y, jax.tree.map(put, kept_S, kept)

    def backward(
        self, task: TickTasks, x: jax.Array, g: jax.Array, kept_S: Any, sums: Any
    ) -> tuple[jax.Array, Any]:
        """The gradient of its input; those of its parameters accumulate."""
        of_chunks, ends = sums
        with self.turns_scope(*(self.ticks.tasks.kind == BACKWARD).sum(axis=0)):
            if self.ticks.kept_slots:
                kept = jax.tree.map(lambda array_S: _at(array_S, task.kept_slot), kept_S)
                of_x, of_layers, ends = self.stage(task).backward_kept(kept, g, ends)
            else:
                of_x, of_layers, ends = self.stage(task).backward_anew(x, g, ends)
            of_layers = self.reduce({self.stacked: of_layers})[self.stacked]
            chunk = task.stage // self.ticks.ranks
            total = jax.tree.map(lambda x: _at(x, chunk), of_chunks)
            of_chunks = jax.tree.map(
                lambda x, after: lax.dynamic_update_index_in_dim(x, after, chunk, 0),
                of_chunks,
                add(total, of_layers),
            )
        return of_x, (of_chunks, ends)

    def stage(self, task: TickTasks) -> Stage:
        """The stage and the microbatch that are next."""
        by_chunk = self.by_chunk(self.params[self.stacked])
        of_stage = jax.tree.leaves(by_chunk)[0].shape[1]
        return Stage(
            self.pieces,
            self.stacked,
            layers=jax.tree.map(lambda x: _at(x, task.stage // self.ticks.ranks), by_chunk),
            rest={key: self.params[key] for key in self.params if key != self.stacked},
            batch=jax.tree.map(lambda x: _at(x, task.microbatch), self.batch),
            first_layer=task.stage * of_stage,
            is_first=task.stage == 0,
            is_last=task.stage == self.ticks.stages - 1,
            accumulate=lambda total, gradients: add(total, self.reduce(gradients)),
            end_scope=self.end_scope,
        )

    def by_chunk(self, layers: Any) -> Any:
        """Leaves (v layers of a stage, ...) -> (v, layers of a stage, ...)."""
        chunks = self.ticks.stages // self.ticks.ranks
        return jax.tree.map(lambda x: x.reshape(chunks, -1, *x.shape[1:]), layers)

    def end_scope(self, rank: int) -> AbstractContextManager:
        """The scope of what one end of the pipeline runs, for each microbatch; the last rank is -1."""
        turns = [0] * self.ticks.ranks
        turns[rank] = self.ticks.microbatches
        return self.turns_scope(*turns)

    def turns_scope(self, *turns: int) -> AbstractContextManager:
        """A scope that tells the ledger at how many of the ticks its content runs, on each rank."""
        counts = "_".join(map(str, turns if len(set(turns)) > 1 else turns[:1]))
        return jax.named_scope(f"runs_{counts}_of_{len(self.ticks.tasks.kind)}")


def microbatches(batch: Any, *, each: int) -> Any:
    """Cut every accumulated pass into `each` microbatches: arrays (A, b, ...) -> (A each, b / each, ...).

    Raises:
        ValueError: they do not divide a device's rows.
    """
    for x in jax.tree.leaves(batch):
        if x.shape[1] % each:
            raise ValueError(f"layout.microbatches = {each} does not divide {x.shape[1]} rows of a device")
    return jax.tree.map(lambda x: x.reshape(x.shape[0] * each, -1, *x.shape[2:]), batch)


def keep_within_a_tick(model: Any) -> None:
    """An edit of the model: its layers keep matrix products for the rest of a tick."""
    model.wrap_layer = partial(apply_remat, remat=WITHIN_A_TICK)


def keeps_activations(remat: Remat) -> bool:
    """Whether forwards keep the residuals of backward; else they keep their input."""
    return remat != "full"


def mark_varying(params: Any, placements: Any) -> Any:
    """Mark what pp does not split as each device's own: its gradient stays local, out of the ticks."""
    return map_repeated(lambda x: collectives.to_varying(x, AXIS), AXIS, placements, params)


def sum_tied_gradients(gradients: Any, placements: Any) -> Any:
    """The sums over pp of gradients of what pp does not split: the lookup's and the head's, once a step."""
    reduce = partial(collectives.all_reduce, axis=AXIS, purpose=TIED_GRADIENTS)
    return map_repeated(reduce, AXIS, placements, gradients)


def add(total: Any, gradients: Any) -> Any:
    """Add a microbatch's gradients to those before it."""
    return jax.tree.map(lax.add, total, gradients)


def _at(x: jax.Array, index: Any) -> jax.Array:
    return lax.dynamic_index_in_dim(x, index, keepdims=False)
