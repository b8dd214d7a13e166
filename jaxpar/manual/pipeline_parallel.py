"""Pipeline parallelism by hand: devices hold a share of the layers each, and microbatches pass through them.

All devices run one program, a scan over the ticks of a schedule (`jaxpar.manual.ticks`). At each tick a
device looks up what it has to do, does it (idle, forward, or backward: a branch of a `lax.switch`), and two
permutes carry what came out to its neighbours: activations one place on, gradients one place back.

Autodiff never sees the pipeline. Backward is written out as the chain rule over three pieces of the model
(embed, layers, loss), each a `jax.vjp` at the stage's input, which alone was kept: so the stage's forward
is computed anew, and layout.remat is "full" here whatever the layers keep in between. Nor does autodiff see
a `lax.cond`: it would write zeros on every device for what only the last one has to remember, logits
included. The last stage's forward would be of use to nobody, so it is left to its backward.

Every device has all of what pp does not split (embeddings, the last norm), as one program wants equal
shapes; only the first and the last one use it, each for its end, and their gradients are added up once a
step. A tied embedding needs nothing else: its copies get the same gradient, and stay equal for ever.

For any model in pieces, inside `shard_map`; the stacked leaves are in the order of the devices
(`jaxpar.placement`), and only this device's are here:

    pieces = Pieces(
        embed=lambda params, batch: batch["x"] @ params["first"],
        layers=lambda params, x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["blocks"])[0],
        loss=lambda params, x, batch: jnp.square(x @ params["first"].T - batch["y"]).mean(),
    )
    ticks = lock_step(make_schedule("1f1b", ranks=4, microbatches=8))

    def gradients_of(params, batch):                # batch: {"x": (M, B, in), "y": (M, B, in)}
        local = own_copies(params, placements)
        value, gradients = pipelined_gradients(pieces, ticks, local, batch)
        return value, sum_tied_gradients(gradients, placements)

    specs = {"first": P(), "blocks": P("pp")}
    step = jax.jit(per_device(gradients_of, mesh=mesh, in_specs=(specs, P()), out_specs=(P(), specs)))

Sources: GPipe (arXiv 1811.06965), 1F1B (2006.09503), interleaved (2104.04473).

Legend: M microbatches of a step, B sequences of one, T ticks, S slots, R ranks, v stages of a device.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar import collectives
from jaxpar.manual.ticks import Ticks, Work
from jaxpar.placement import Placement
from jaxpar.plan import Pieces
from jaxpar.remat import Remat, apply_remat

AXIS = "pp"
WITHIN_A_TICK: Remat = "dots"
"""What a stage's forward keeps until its backward, which follows in the same tick: enough not to compute
matrix products a third time. It is of one microbatch, and gone at the end of the tick."""


class Sums(NamedTuple):
    """What adds up over microbatches."""

    loss: jax.Array
    rest: Any
    """Gradients of all that pp does not split."""
    layers: Any
    """Gradients of this device's layers, by chunk: leaves (v, layers of a stage, ...)."""


class Carry(NamedTuple):
    """What a tick leaves to the next."""

    inputs_S: jax.Array
    """Inputs of stages, and last the bin."""
    gradients_S: jax.Array
    """Gradients of stages' outputs, and last the bin."""
    sums: Sums


def keep_within_a_tick(model: Any) -> None:
    """An edit of the model: its layers keep what is worth keeping for the rest of a tick."""
    model.wrap_layer = partial(apply_remat, remat=WITHIN_A_TICK)


def own_copies(params: Any, placements: Any) -> Any:
    """Mark what pp does not split as each device's own: its gradient stays local, and out of the ticks."""

    def mark(p: Placement, x: jax.Array) -> jax.Array:
        return collectives.to_varying(x, AXIS) if p.pp_dim is None else x

    return jax.tree.map(mark, placements, params)


def sum_tied_gradients(gradients: Any, placements: Any) -> Any:
    """The sums over pp of gradients of what pp does not split: the lookup's and the head's, once a step."""

    def reduce(p: Placement, g: jax.Array) -> jax.Array:
        return g if p.pp_dim is not None else sum_over_ends(g)

    return jax.tree.map(reduce, placements, gradients)


def sum_over_ends(gradient: jax.Array) -> jax.Array:
    """The sum of the first and the last device's part; those in between have zeros."""
    with jax.named_scope("for_tied_gradients"):
        return collectives.all_reduce(gradient, AXIS)


def microbatches(batch: Any, *, each: int) -> Any:
    """Cut every accumulated pass into `each` microbatches: arrays (A, b, ...) -> (A each, b / each, ...)."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] * each, -1, *x.shape[2:]), batch)


def pipelined_gradients(
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
            others are marked as its own (`own_copies`).
        batch: a pytree of arrays (M, B, ...), the same on all devices of pp.
        stacked: the key of the stacked layers.
        reduce: applied to the gradients of each microbatch before they are added up: to a dict that has
            some of the keys of `params`.
        like: a pytree like what `reduce` makes of the gradients of all of `params`; these by default.

    Returns:
        The loss, on all devices; and gradients as `reduce` leaves them: means over M, of the layers this
        device's, of all else what this device's stages contribute.

    Raises:
        ValueError: the schedule is for another number of devices or microbatches.
    """
    (count,) = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
    devices = collectives.axis_size(AXIS)
    if (ticks.ranks, ticks.microbatches) != (devices, count):
        raise ValueError(
            f"a schedule of {ticks.ranks} ranks and {ticks.microbatches} microbatches, for {devices} devices "
            f"and {count} microbatches"
        )
    by_chunk = partial(_by_chunk, chunks=ticks.stages // ticks.ranks)
    device = _Device(pieces, ticks, {**params, stacked: by_chunk(params[stacked])}, batch, stacked, reduce)
    zeros = jax.tree.map(jnp.zeros_like, params if like is None else like)
    zero_rest = {key: zeros[key] for key in zeros if key != stacked}
    carry = device.start(zero_rest, by_chunk(zeros[stacked]))
    own_T = jax.tree.map(lambda work_TR: jnp.asarray(work_TR)[:, lax.axis_index(AXIS)], ticks.work)
    sent_T = jnp.asarray(ticks.sends_activations), jnp.asarray(ticks.sends_gradients)
    sums = lax.scan(device.tick, carry, (own_T, *sent_T))[0].sums
    gradients = {**sums.rest, stacked: jax.tree.map(_joined, sums.layers)}
    loss = collectives.all_reduce(sums.loss, AXIS)  # the last stage's; zero elsewhere
    return loss / count, jax.tree.map(lambda g: g / count, gradients)


class _Device(NamedTuple):
    """One device's part in the ticks."""

    pieces: Pieces
    ticks: Ticks
    params: Any
    """Its stacked layers by chunk: leaves (v, layers of a stage, ...)."""
    batch: Any
    stacked: str
    reduce: Callable[[Any], Any]

    def start(self, zero_rest: Any, zero_layers: Any) -> Carry:
        """Before the first tick: empty slots, and sums of zero."""
        batch, layers = (
            jax.tree.map(lambda x: x[0], tree) for tree in (self.batch, self.params[self.stacked])
        )
        params = {**self.params, self.stacked: layers}
        # Only their types are wanted, the axes along which they vary included; XLA drops the numbers.
        x = self.pieces.embed(params, batch)
        loss = self.pieces.loss(params, x, batch)
        empty = partial(_empty_slots, jnp.zeros_like(x))
        return Carry(
            empty(self.ticks.input_slots),
            empty(self.ticks.gradient_slots),
            Sums(jnp.zeros_like(loss), zero_rest, zero_layers),
        )

    def tick(self, carry: Carry, now: tuple[Work, jax.Array, jax.Array]) -> tuple[Carry, None]:
        """Do what there is to do, hand on what came out of it, and store what arrives."""
        inputs_S, gradients_S, _ = carry
        work, is_activation, is_gradient = now
        x, g = inputs_S[work.input_slot], gradients_S[work.gradient_slot]
        branches = (self.idle, self.forward, self.backward)
        y, of_x, sums = lax.switch(work.kind, branches, work, x, g, carry.sums)
        with jax.named_scope("for_activations"), self.runs(self.ticks.sends_activations.sum()):
            y = lax.cond(is_activation, partial(collectives.shift, axis=AXIS, by=-1), jnp.zeros_like, y)
        with jax.named_scope("for_activation_gradients"), self.runs(self.ticks.sends_gradients.sum()):
            of_x = lax.cond(is_gradient, partial(collectives.shift, axis=AXIS), jnp.zeros_like, of_x)
        inputs_S = lax.dynamic_update_index_in_dim(inputs_S, y, work.arriving_input, 0)
        gradients_S = lax.dynamic_update_index_in_dim(gradients_S, of_x, work.arriving_gradient, 0)
        return Carry(inputs_S, gradients_S, sums), None

    def idle(self, work: Work, x: jax.Array, g: jax.Array, sums: Sums):
        """Nothing to do: the bubble."""
        return jnp.zeros_like(x), jnp.zeros_like(g), sums

    def forward(self, work: Work, x: jax.Array, g: jax.Array, sums: Sums):
        """The stage's output, for the next one; the last one's is computed in its backward."""

        def compute(x: jax.Array) -> jax.Array:
            x = self.stage_input(work, x)
            with self.runs(self.tasks):
                return self.pieces.layers(self.stage_params(work), x)

        y = lax.cond(self.is_last(work), jnp.zeros_like, compute, x)
        return y, jnp.zeros_like(g), sums

    def backward(self, work: Work, x: jax.Array, g: jax.Array, sums: Sums):
        """The gradient of the stage's input, for the one before; those of its parameters are added up.

        The chain rule, by hand: forward through embed, layers and loss, and back again.
        """
        params, batch = self.stage_params(work), self.microbatch(work)
        layers = params.pop(self.stacked)

        def run_layers(layers: Any, x: jax.Array) -> jax.Array:
            return self.pieces.layers({**params, self.stacked: layers}, x)

        def from_loss(y: jax.Array, g: jax.Array, sums: Sums) -> tuple[jax.Array, Sums]:
            def loss_of(rest: Any, y: jax.Array) -> jax.Array:
                return self.pieces.loss({**rest, self.stacked: layers}, y, batch)

            with self.runs(self.ticks.microbatches):
                loss, (of_rest, of_y) = jax.value_and_grad(loss_of, argnums=(0, 1))(params, y)
                rest = add(sums.rest, self.reduce(of_rest))
            return of_y, sums._replace(loss=sums.loss + loss, rest=rest)

        def into_embedding(of_x: jax.Array, sums: Sums) -> Sums:
            def embed(rest: Any) -> jax.Array:
                return self.pieces.embed({**rest, self.stacked: layers}, batch)

            with self.runs(self.ticks.microbatches):
                (of_rest,) = jax.vjp(embed, params)[1](of_x)
                return sums._replace(rest=add(sums.rest, self.reduce(of_rest)))

        x = self.stage_input(work, x)
        with self.runs(self.tasks):
            y, back = jax.vjp(run_layers, layers, x)
        of_y, sums = lax.cond(self.is_last(work), from_loss, lambda y, g, sums: (g, sums), y, g, sums)
        with self.runs(self.tasks):
            of_layers, of_x = back(of_y)
            sums = sums._replace(layers=self.add_to_chunk(sums.layers, of_layers, work))
        sums = lax.cond(work.stage == 0, into_embedding, lambda of_x, sums: sums, of_x, sums)
        return jnp.zeros_like(x), of_x, sums

    @property
    def tasks(self) -> int:
        """Forwards of a device in a step; and backwards."""
        return self.ticks.microbatches * self.ticks.stages // self.ticks.ranks

    def runs(self, turns: int) -> AbstractContextManager:
        """A scope that tells the ledger at how many of the ticks what is in it runs."""
        return jax.named_scope(f"runs_{turns}_of_{len(self.ticks.work.kind)}")

    def is_last(self, work: Work) -> jax.Array:
        """Whether the work's stage is the last along the model."""
        return work.stage == self.ticks.stages - 1

    def microbatch(self, work: Work) -> Any:
        """The work's part of the batch."""
        return jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, work.microbatch, keepdims=False), self.batch
        )

    def stage_params(self, work: Work) -> Any:
        """All parameters, of the stacked layers only the stage's."""
        layers = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, work.stage // self.ticks.ranks, keepdims=False),
            self.params[self.stacked],
        )
        return {**self.params, self.stacked: layers}

    def stage_input(self, work: Work, x: jax.Array) -> jax.Array:
        """What arrived for the stage; the first one has the embedding instead."""

        def embed(x: jax.Array) -> jax.Array:
            with self.runs(self.ticks.microbatches):
                return self.pieces.embed(self.stage_params(work), self.microbatch(work))

        return lax.cond(work.stage == 0, embed, lambda x: x, x)

    def add_to_chunk(self, total: Any, of_layers: Any, work: Work) -> Any:
        """Add the gradients of one stage's layers to those of its chunk."""
        chunk = work.stage // self.ticks.ranks
        of_layers = self.reduce({self.stacked: of_layers})[self.stacked]
        before = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, chunk, keepdims=False), total)
        return jax.tree.map(
            lambda x, after: lax.dynamic_update_index_in_dim(x, after, chunk, 0),
            total,
            add(before, of_layers),
        )


def add(total: Any, gradients: Any) -> Any:
    """Add a microbatch's gradients to those before it."""
    return jax.tree.map(lax.add, total, gradients)


def _by_chunk(layers: Any, *, chunks: int) -> Any:
    """Stacked leaves (v layers of a stage, ...) -> (v, layers of a stage, ...)."""
    return jax.tree.map(lambda x: x.reshape(chunks, -1, *x.shape[1:]), layers)


def _joined(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[2:])


def _empty_slots(x: jax.Array, count: int) -> jax.Array:
    """Zeros like x, once for each slot and once for the bin."""
    return jnp.stack([x] * (count + 1))
