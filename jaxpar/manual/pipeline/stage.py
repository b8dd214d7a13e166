"""One stage of a pipeline at work on one microbatch: forward, and backward as the chain rule by hand.

A stage is some of the model's layers; the first one begins with the embedding, the last one ends with the
loss. Backward starts from the stage's input and computes its forward anew, or from what forward has kept:
the arrays that autodiff's backward needs, without the parameters, which are there anyway.

Autodiff sees each piece by itself, never a `lax.cond`: differentiated, that would write zeros on every device
in place of the last one's residuals, logits among them. So the pieces are joined here, and an end is computed
only on the device that has it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.problem import Pieces
from jaxpar.tracing.flow import NOTHING, labels_by_output

FIRST, LAST = 0, -1
"""The ranks at the ends of a pipeline."""


class EndSums(NamedTuple):
    """Sums over microbatches at the two ends of a pipeline."""

    loss: jax.Array
    """Loss of the last stage, ()."""
    gradients: Any
    """Gradients of all parameters outside the layers: embedding on the first stage, loss on the last."""


class Residuals(NamedTuple):
    """Tensors of a microbatch that a forward keeps for its backward."""

    y: jax.Array
    """Output of the layers, input of the last stage's loss."""
    arrays: list[jax.Array]
    """Residuals of autodiff's backward of the layers, without parameters."""


class Stage(NamedTuple):
    """A stage, and its current microbatch. x, y and g have one shape, (B, ...): that of its activations."""

    pieces: Pieces
    stacked: str
    """The key of the layers among the parameters."""
    layers: Any
    """Parameters of the stage's layers: leaves (layers of a stage, ...)."""
    rest: dict[str, Any]
    """All other parameters."""
    batch: Any
    """The microbatch: leaves (B, ...)."""
    first_layer: jax.Array
    """The number of its first layer among the model's, (); `is_first` and `is_last` are scalars, too."""
    is_first: jax.Array
    is_last: jax.Array
    accumulate: Callable[[Any, Any], Any]
    """(sums, gradients of `rest` for this microbatch) -> sums."""
    end_scope: Callable[[int], AbstractContextManager]
    """A scope around the computations of one end alone, given FIRST or LAST, for the ledger."""

    def forward(self, x: jax.Array) -> jax.Array:
        """Output y of the stage, shaped as its input x, for the next stage; the first stage ignores x."""
        return self.run_layers(self.layers, self.start(x))

    def forward_keeping(self, x: jax.Array) -> Residuals:
        """Output y of the stage, shaped as its input x, and the residuals of its backward."""
        start = self.start(x)
        y, back = jax.vjp(self.run_layers, self.layers, start)
        needed = zip(jax.tree.leaves(back), self.comes_of_input(start), strict=True)
        return Residuals(y, [array for array, kept in needed if kept])

    def backward_anew(self, x: jax.Array, g: jax.Array, sums: EndSums) -> tuple[jax.Array, Any, EndSums]:
        """`backward` from the stage's input x, shaped as g: it computes the forward again."""
        y, back = jax.vjp(self.run_layers, self.layers, self.start(x))
        return self.backward(y, back, g, sums)

    def backward_kept(self, kept: Residuals, g: jax.Array, sums: EndSums) -> tuple[jax.Array, Any, EndSums]:
        """`backward` from the residuals of its forward, whose y has the shape of g."""
        # A forward for its structure, and for what is made of parameters alone; XLA drops the rest.
        start = jnp.zeros_like(kept.y)
        _, back = jax.vjp(self.run_layers, self.layers, start)
        arrays, structure = jax.tree.flatten(back)
        found = iter(kept.arrays)
        arrays = [
            next(found) if is_kept else array
            for array, is_kept in zip(arrays, self.comes_of_input(start), strict=True)
        ]
        return self.backward(kept.y, jax.tree.unflatten(structure, arrays), g, sums)

    def comes_of_input(self, x: jax.Array) -> list[bool]:
        """For each residual of an input shaped as x: whether it depends on the input."""

        def needed(layers: Any, x: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(jax.vjp(self.run_layers, layers, x)[1])

        traced = jax.make_jaxpr(needed)(self.layers, x)
        of_layers = [NOTHING] * len(jax.tree.leaves(self.layers))
        labels = labels_by_output(traced, [*of_layers, frozenset({("input", "stage")})])
        return [bool(found) for found in labels]

    def backward(
        self, y: jax.Array, back: Callable[[jax.Array], Any], g: jax.Array, sums: EndSums
    ) -> tuple[jax.Array, Any, EndSums]:
        """Backward of the layers and of the ends.

        Args:
            y: output of the layers.
            back: backward of the layers: g -> gradients of (layers, input).
            g: gradient of y, shaped as y; the last stage ignores it.
            sums: of the microbatches before.

        Returns:
            Gradients of the stage's input, shaped as y, and of the layers, leaves (layers of a stage, ...);
            the new sums.
        """
        g, sums = lax.cond(self.is_last, self.loss_backward, lambda y, g, sums: (g, sums), y, g, sums)
        of_layers, of_x = back(g)
        sums = lax.cond(self.is_first, self.embed_backward, lambda g, sums: sums, of_x, sums)
        return of_x, of_layers, sums

    def start(self, x: jax.Array) -> jax.Array:
        """Input of the stage's layers, shaped as x: the embedding on the first stage, x on the others."""

        def embed(x: jax.Array) -> jax.Array:
            with self.end_scope(FIRST):
                return self.pieces.embed(self.params(self.rest), self.batch)

        return lax.cond(self.is_first, embed, lambda x: x, x)

    def run_layers(self, layers: Any, x: jax.Array) -> jax.Array:
        """Output of the layers, leaves (layers of a stage, ...), shaped as their input x."""
        return self.pieces.layers({**self.rest, self.stacked: layers}, x, self.batch, self.first_layer)

    def loss_backward(self, y: jax.Array, g: jax.Array, sums: EndSums) -> tuple[jax.Array, EndSums]:
        """Gradient of the loss by the last layer's output y, shaped as y; g is ignored."""

        def loss(rest: Any, y: jax.Array) -> jax.Array:
            return self.pieces.loss(self.params(rest), y, self.batch)

        with self.end_scope(LAST):
            value, (of_rest, of_y) = jax.value_and_grad(loss, argnums=(0, 1))(self.rest, y)
            return of_y, EndSums(sums.loss + value, self.accumulate(sums.gradients, of_rest))

    def embed_backward(self, g: jax.Array, sums: EndSums) -> EndSums:
        """Add the embedding's gradients to the sums, given g, the gradient of its output, shaped as x."""

        def embed(rest: Any) -> jax.Array:
            return self.pieces.embed(self.params(rest), self.batch)

        with self.end_scope(FIRST):
            _, back = jax.vjp(embed, self.rest)
            (of_rest,) = back(g)
            return sums._replace(gradients=self.accumulate(sums.gradients, of_rest))

    def params(self, rest: Any) -> Any:
        """The whole tree, as the pieces take it."""
        return {**rest, self.stacked: self.layers}
