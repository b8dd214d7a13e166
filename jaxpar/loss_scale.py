"""Loss scaling inside a step (`compare.numerics.loss_scale`): where the step's scalars have a `loss_scale`.

Backward starts from it, gradients are divided by it, and a step whose gradients overflowed changes nothing.

Where it overflows depends on how large a part of the batch a loss is the mean of: the mean of a half has
gradients twice as large as its share of the whole. So that all engines skip the same steps, backward starts
from a microbatch's share of the mean, and not from its own mean: `parts` is the number of microbatches. Of
the replicas each begins with a mean of its own: where a loss is the mean of R of theirs, `parts` is R times
less.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Scalars = dict[str, Any]


def scaled(loss: Callable[..., jax.Array], scalars: Scalars, *, parts: float = 1) -> Callable[..., jax.Array]:
    """The loss, the mean over a microbatch, with gradients multiplied by the scale.

    `parts` is the number of the step's microbatches, over the replicas whose mean it is.
    """
    if "loss_scale" not in scalars:
        return loss
    return lambda *arguments: _scale_gradient(loss(*arguments), scalars["loss_scale"] / parts)


def unscaled(gradients: Any, scalars: Scalars, *, parts: float = 1) -> Any:
    """Gradients of a scaled loss over the scale: leaves of any shape; an overflow stays infinite or NaN."""
    if "loss_scale" not in scalars:
        return gradients
    return jax.tree.map(lambda g: g / (scalars["loss_scale"] / parts), gradients)


def unless_overflowed(after: Any, before: Any, *, grad_norm: jax.Array, scalars: Scalars) -> Any:
    """The state after a step, or the one before it if the norm of its unscaled gradients is infinite or NaN.

    Without a loss scale every step counts.
    """
    if "loss_scale" not in scalars:
        return after
    return jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(grad_norm), new, old), after, before)


@jax.custom_vjp
def _scale_gradient(value: jax.Array, scale: jax.Array) -> jax.Array:
    return value


_scale_gradient.defvjp(
    lambda value, scale: (value, scale),
    lambda scale, gradient: (gradient * scale, None),
)
