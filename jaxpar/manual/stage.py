"""One stage of a pipeline and one microbatch: forward, and backward as the chain rule by hand.

A stage is some of the model's blocks. The first stage begins with the embedding, and the last stage ends with
the loss. Backward needs the residuals of the blocks. Either forward keeps them, without the parameters, or
backward computes forward again from the stage's input.

Autodiff differentiates the embedding, the blocks and the loss one by one, and never a `lax.cond`. It would
store the residuals of both branches on every device, the logits too.

Legend: B sequences of a microbatch, T positions, C n_embd. x, y and their gradients dx, dy are (B, T, C).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from compare.pipeline.ticks import BACKWARD, Ticks, TickTasks
from jaxpar.comm.collectives import run_if
from jaxpar.model import PipelineParts
from jaxpar.weights import STACKED, without_layers


class EndSums(NamedTuple):
    """Sums over microbatches at the end stages: the loss, and gradients of parameters outside the blocks."""

    loss: jax.Array
    gradients: Any


class Residuals(NamedTuple):
    """The blocks' output, and the residuals of autodiff that depend on the batch."""

    y: jax.Array
    arrays: list[jax.Array]


class Stage(NamedTuple):
    """A stage and its current microbatch."""

    parts: PipelineParts
    ticks: Ticks
    task: TickTasks
    params: dict[str, Any]
    """All parameters outside the blocks, and this stage's blocks: leaves (layers of a stage, ...)."""
    batch: Any
    accumulate: Callable[[Any, Any], Any]
    """(sums, gradients of this microbatch) -> sums."""

    def forward(self, x: jax.Array) -> tuple[jax.Array, Any]:
        """Output y for the next stage, and `Residuals`, or (). The first stage ignores x."""
        layers, start = self.params[STACKED], self.start(x)
        if not self.ticks.kept_slots:
            return self.run_layers(layers, start), ()
        y, back = jax.vjp(self.run_layers, layers, start)
        arrays = zip(jax.tree.leaves(back), self.depends_on_batch(start), strict=True)
        return y, Residuals(y, [array for array, depends in arrays if depends])

    def backward(
        self, x: jax.Array, residuals: Any, dy: jax.Array, sums: EndSums
    ) -> tuple[jax.Array, Any, EndSums]:
        """Gradients of the stage's input and of its blocks, and new sums. The last stage ignores dy."""
        if self.ticks.kept_slots:
            y, back = residuals.y, self.rebuild_vjp(residuals)
        else:
            y, back = jax.vjp(self.run_layers, self.params[STACKED], self.start(x))
        unchanged = lambda y, dy, sums: (dy, sums)  # noqa: E731
        dy, sums = self.on_stage(self.ticks.stages - 1, self.loss_backward, unchanged, y, dy, sums)
        dlayers, dx = back(dy)
        sums = self.on_stage(0, self.embed_backward, lambda dx, sums: sums, dx, sums)
        return dx, dlayers, sums

    def start(self, x: jax.Array) -> jax.Array:
        """Input of the blocks: the embedding on the first stage, x on the others."""

        def embed(x: jax.Array) -> jax.Array:
            return self.parts.embed(self.params, self.batch)

        return self.on_stage(0, embed, lambda x: x, x)

    def run_layers(self, layers: Any, x: jax.Array) -> jax.Array:
        """Output y of the blocks."""
        first_layer = self.task.stage * jax.tree.leaves(layers)[0].shape[0]
        return self.parts.layers({**self.params, STACKED: layers}, x, self.batch, first_layer)

    def loss_backward(self, y: jax.Array, dy: jax.Array, sums: EndSums) -> tuple[jax.Array, EndSums]:
        """Gradient of the loss by y, and new sums. The dy that arrives is scratch."""

        def loss(rest: Any, y: jax.Array) -> jax.Array:
            return self.parts.loss({**self.params, **rest}, y, self.batch)

        value, (drest, dy) = jax.value_and_grad(loss, argnums=(0, 1))(without_layers(self.params), y)
        return dy, EndSums(sums.loss + value, self.accumulate(sums.gradients, drest))

    def embed_backward(self, dx: jax.Array, sums: EndSums) -> EndSums:
        """Add the embedding's gradients to the sums, from the gradient of its output."""

        def embed(rest: Any) -> jax.Array:
            return self.parts.embed({**self.params, **rest}, self.batch)

        _, back = jax.vjp(embed, without_layers(self.params))
        return sums._replace(gradients=self.accumulate(sums.gradients, *back(dx)))

    def on_stage(
        self, stage: int, compute: Callable[..., Any], otherwise: Callable[..., Any], *operands: Any
    ) -> Any:
        """Return compute(*operands) on one stage, and otherwise(*operands) on all other stages."""
        tasks = self.ticks.tasks
        runs_TR = (tasks.kind == BACKWARD) & (tasks.stage == stage)  # a stage has as many forwards
        return run_if(self.task.stage == stage, runs_TR, compute, otherwise, *operands)

    def rebuild_vjp(self, residuals: Residuals) -> Callable[[jax.Array], Any]:
        """Return the blocks' backward from its residuals: dy -> gradients of (layers, input)."""
        # Trace a forward for the structure, and for the residuals of parameters. XLA drops the computation.
        start = jnp.zeros_like(residuals.y)
        _, back = jax.vjp(self.run_layers, self.params[STACKED], start)
        arrays, structure = jax.tree.flatten(back)
        kept = iter(residuals.arrays)
        depends = self.depends_on_batch(start)
        arrays = [next(kept) if is_kept else a for a, is_kept in zip(arrays, depends, strict=True)]
        return jax.tree.unflatten(structure, arrays)

    def depends_on_batch(self, x: jax.Array) -> list[bool]:
        """True for each residual of the blocks that twice the rows enlarge; False for parameters."""

        def residuals(layers: Any, x: jax.Array, batch: Any) -> list[jax.Array]:
            return jax.tree.leaves(jax.vjp(self._replace(batch=batch).run_layers, layers, x)[1])

        twice = jax.tree.map(lambda a: jnp.concatenate([a, a]), (x, self.batch))
        rows = ((x, self.batch), twice)
        sizes = (jax.eval_shape(residuals, self.params[STACKED], *arrays) for arrays in rows)
        return [single.shape != double.shape for single, double in zip(*sizes, strict=True)]
