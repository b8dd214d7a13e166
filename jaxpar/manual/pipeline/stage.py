"""One stage of a pipeline at work on one microbatch: forward, and backward as the chain rule by hand.

A stage is some of the model's layers; the first one begins with the embedding, the last one ends with the
loss. Backward starts from the stage's input, the only thing kept, and computes its forward anew.

Autodiff sees each piece by itself, never a `lax.cond`: differentiated, that would write zeros on every device
in place of the last one's residuals, logits among them. So the pieces are joined here, and an end is computed
only on the device that has it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax import lax

from jaxpar.problem import Pieces


class EndSums(NamedTuple):
    """Sums over microbatches at the two ends of a pipeline."""

    loss: jax.Array
    """The last one's."""
    gradients: Any
    """Of all parameters that are in no layer: from the embedding on the first, from the loss on the last."""


class Stage(NamedTuple):
    """A stage, and the microbatch that it works on."""

    pieces: Pieces
    stacked: str
    """The key of the layers among the parameters."""
    layers: Any
    """The stage's: leaves (layers of a stage, ...)."""
    rest: dict[str, Any]
    """All other parameters."""
    batch: Any
    """The microbatch: leaves (B, ...)."""
    is_first: jax.Array
    is_last: jax.Array
    accumulate: Callable[[Any, Any], Any]
    """(sums, gradients of `rest` for this microbatch) -> sums."""
    end_scope: Callable[[], AbstractContextManager]
    """A scope around the computations of only one end, for the ledger."""

    def forward(self, x: jax.Array) -> jax.Array:
        """The stage's output, for the next one; of the first stage, x is ignored."""
        return self.run_layers(self.layers, self.start(x))

    def backward(self, x: jax.Array, g: jax.Array, sums: EndSums) -> tuple[jax.Array, Any, EndSums]:
        """From the stage's input, and the gradient of its output, which the last stage ignores.

        Returns:
            The gradient of the input, of the layers, and the sums of the ends.
        """
        y, back = jax.vjp(self.run_layers, self.layers, self.start(x))
        g, sums = lax.cond(self.is_last, self.loss_backward, lambda y, g, sums: (g, sums), y, g, sums)
        of_layers, of_x = back(g)
        sums = lax.cond(self.is_first, self.embed_backward, lambda g, sums: sums, of_x, sums)
        return of_x, of_layers, sums

    def start(self, x: jax.Array) -> jax.Array:
        """The input of the stage's layers: the embedding on the first, on the others what arrived."""

        def embed(x: jax.Array) -> jax.Array:
            with self.end_scope():
                return self.pieces.embed(self.params(self.rest), self.batch)

        return lax.cond(self.is_first, embed, lambda x: x, x)

    def run_layers(self, layers: Any, x: jax.Array) -> jax.Array:
        """x after the stage's layers."""
        return self.pieces.layers({**self.rest, self.stacked: layers}, x)

    def loss_backward(self, y: jax.Array, g: jax.Array, sums: EndSums) -> tuple[jax.Array, EndSums]:
        """The gradient of the loss by the last layer's output y."""

        def loss(rest: Any, y: jax.Array) -> jax.Array:
            return self.pieces.loss(self.params(rest), y, self.batch)

        with self.end_scope():
            value, (of_rest, of_y) = jax.value_and_grad(loss, argnums=(0, 1))(self.rest, y)
            return of_y, EndSums(sums.loss + value, self.accumulate(sums.gradients, of_rest))

    def embed_backward(self, g: jax.Array, sums: EndSums) -> EndSums:
        """Add the embedding's gradients, given those of its output."""

        def embed(rest: Any) -> jax.Array:
            return self.pieces.embed(self.params(rest), self.batch)

        with self.end_scope():
            _, back = jax.vjp(embed, self.rest)
            (of_rest,) = back(g)
            return sums._replace(gradients=self.accumulate(sums.gradients, of_rest))

    def params(self, rest: Any) -> Any:
        """The whole tree, as the pieces take it."""
        return {**rest, self.stacked: self.layers}
