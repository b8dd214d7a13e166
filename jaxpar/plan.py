"""What one optimizer step is to both engines: the plan that they hand to the training loop.

Legend: A gradient accumulation, B batch, T position.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax
from jax.sharding import Sharding

Loss = Callable[[Any, Any], jax.Array]
"""loss(params, batch): a scalar, the mean over the batch's leading dim."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An engine's step, and where its arguments live."""

    step: Callable[..., Any]
    """step(params, opt_state, batch, scalars) -> (params, opt_state, {"loss", "grad_norm"}, gradients).

    `batch` is a dict of (A, B, T); `gradients` are synchronised and unclipped: the loop compiles the
    step without them, and only a ladder asks for them.
    """
    state: Sharding
    """Of parameters, moments and gradients."""
    batch: Sharding
    """Of each (A, B, T) array of the batch."""
    scalars: Sharding
    compiler_options: dict[str, Any] = field(default_factory=dict)


def accumulated_gradients(loss: Loss, params: Any, batch: Any) -> tuple[jax.Array, Any]:
    """Mean loss and its gradients over the A microbatches of a batch, one at a time.

    Args:
        loss: see `Loss`.
        params: any pytree.
        batch: a pytree of arrays (A, B, ...).

    Returns:
        The loss, and gradients like `params`: sums over A divided by A.
    """
    value_and_grad = jax.value_and_grad(loss)
    (accumulation,) = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
    if accumulation == 1:
        return value_and_grad(params, jax.tree.map(lambda x: x[0], batch))

    def add(total: Any, microbatch: Any) -> tuple[Any, jax.Array]:
        value, gradients = value_and_grad(params, microbatch)
        return jax.tree.map(lax.add, total, gradients), value

    zeros = jax.tree.map(jax.numpy.zeros_like, params)
    total, losses_A = lax.scan(add, zeros, batch)
    return losses_A.mean(), jax.tree.map(lambda g: g / accumulation, total)
