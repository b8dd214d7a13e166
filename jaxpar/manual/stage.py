"""One stage of a pipeline at work on one microbatch: forward, and backward as the chain rule by hand.

A stage is some of the model's blocks; the first stage begins with the embedding, the last one ends with the
loss. Backward needs the stage's residuals. Either forward keeps them, but for parameters, which are there
anyway; or backward computes forward anew from the stage's input.

Autodiff sees each piece by itself, never a `lax.cond`, of which it would write zeros on every device in place
of the last one's residuals, logits among them. So an end is computed only on the device that has it.

Legend: B sequences of a microbatch, T positions, C n_embd. x, y and g, its gradient, are (B, T, C).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from compare.pipeline.ticks import Ticks, TickTasks
from jaxpar.comm import collectives
from jaxpar.model import PipelineParts
from jaxpar.weights import STACKED, without_layers

FIRST, LAST = 0, -1
"""The ranks at the ends of a pipeline."""


class EndSums(NamedTuple):
    """Sums over microbatches at the two ends: loss of the last, gradients of all that is in no block."""

    loss: jax.Array
    gradients: Any


class Residuals(NamedTuple):
    """What a forward keeps for its backward: the blocks' output, and autodiff's needs but for parameters."""

    y: jax.Array
    arrays: list[jax.Array]


class Stage(NamedTuple):
    """A stage and its current microbatch."""

    parts: PipelineParts
    ticks: Ticks
    task: TickTasks
    params: dict[str, Any]
    """The tree as the parts take it, with this stage's blocks alone: leaves (layers of a stage, ...)."""
    batch: Any
    accumulate: Callable[[Any, Any], Any]
    """(sums, gradients for this microbatch of what is in no block) -> sums."""

    def forward(self, x: jax.Array) -> tuple[jax.Array, Any]:
        """Output y for the next stage, and `Residuals`, or (). The first stage ignores x."""
        layers, start = self.params[STACKED], self.start(x)
        if not self.ticks.kept_slots:
            return self.run_layers(layers, start), ()
        y, back = jax.vjp(self.run_layers, layers, start)
        arrays = zip(jax.tree.leaves(back), self.grows_with_rows(start), strict=True)
        return y, Residuals(y, [array for array, grows in arrays if grows])

    def backward(
        self, x: jax.Array, residuals: Any, g: jax.Array, sums: EndSums
    ) -> tuple[jax.Array, Any, EndSums]:
        """Gradients of the stage's input and of its blocks, and new sums; the last stage ignores g."""
        if self.ticks.kept_slots:
            y, back = self.restored(residuals)
        else:
            y, back = jax.vjp(self.run_layers, self.params[STACKED], self.start(x))
        is_last, elsewhere = self.task.stage == self.ticks.stages - 1, lambda y, g, sums: (g, sums)
        g, sums = lax.cond(is_last, self.loss_backward, elsewhere, y, g, sums)
        of_layers, of_x = back(g)
        sums = lax.cond(self.task.stage == 0, self.embed_backward, lambda g, sums: sums, of_x, sums)
        return of_x, of_layers, sums

    def restored(self, residuals: Residuals) -> tuple[jax.Array, Callable[[jax.Array], Any]]:
        """Output y, and the blocks' backward, g -> gradients of (layers, input), from residuals."""
        # A forward for its structure, and for what is made of parameters alone; XLA drops the rest.
        start = jnp.zeros_like(residuals.y)
        _, back = jax.vjp(self.run_layers, self.params[STACKED], start)
        arrays, structure = jax.tree.flatten(back)
        arrays_of_x = iter(residuals.arrays)
        grows = self.grows_with_rows(start)
        arrays = [next(arrays_of_x) if of_x else a for a, of_x in zip(arrays, grows, strict=True)]
        return residuals.y, jax.tree.unflatten(structure, arrays)

    def grows_with_rows(self, x: jax.Array) -> list[bool]:
        """Of each residual of the blocks: do twice the rows make it larger? Else it is made of parameters."""

        def residuals(layers: Any, x: jax.Array, batch: Any) -> list[jax.Array]:
            return jax.tree.leaves(jax.vjp(self._replace(batch=batch).run_layers, layers, x)[1])

        twice = jax.tree.map(lambda a: jnp.concatenate([a, a]), (x, self.batch))
        rows = ((x, self.batch), twice)
        sizes = (jax.eval_shape(residuals, self.params[STACKED], *arrays) for arrays in rows)
        return [single.shape != double.shape for single, double in zip(*sizes, strict=True)]

    def start(self, x: jax.Array) -> jax.Array:
        """Input of the blocks: the embedding on the first stage, x on the others."""

        def embed(x: jax.Array) -> jax.Array:
            with self.end_scope(FIRST):
                return self.parts.embed(self.params, self.batch)

        return lax.cond(self.task.stage == 0, embed, lambda x: x, x)

    def run_layers(self, layers: Any, x: jax.Array) -> jax.Array:
        """Output y of the blocks."""
        first_layer = self.task.stage * jax.tree.leaves(layers)[0].shape[0]
        return self.parts.layers({**self.params, STACKED: layers}, x, self.batch, first_layer)

    def loss_backward(self, y: jax.Array, g: jax.Array, sums: EndSums) -> tuple[jax.Array, EndSums]:
        """Gradient of the loss by y; g is ignored."""

        def loss(rest: Any, y: jax.Array) -> jax.Array:
            return self.parts.loss({**self.params, **rest}, y, self.batch)

        with self.end_scope(LAST):
            rest = without_layers(self.params)
            value, (of_rest, of_y) = jax.value_and_grad(loss, argnums=(0, 1))(rest, y)
            return of_y, EndSums(sums.loss + value, self.accumulate(sums.gradients, of_rest))

    def embed_backward(self, g: jax.Array, sums: EndSums) -> EndSums:
        """Add the embedding's gradients to the sums, given g, the gradient of its output."""

        def embed(rest: Any) -> jax.Array:
            return self.parts.embed({**self.params, **rest}, self.batch)

        with self.end_scope(FIRST):
            _, back = jax.vjp(embed, without_layers(self.params))
            return sums._replace(gradients=self.accumulate(sums.gradients, *back(g)))

    def end_scope(self, rank: int) -> AbstractContextManager:
        """The scope, for the ledger, of what one end of the pipeline runs for each microbatch."""
        turns = [0] * self.ticks.ranks
        turns[rank] = self.ticks.microbatches
        return collectives.turns_scope(turns, of=len(self.ticks.tasks.kind))
