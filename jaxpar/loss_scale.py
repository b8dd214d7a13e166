"""Loss scaling inside a step (`compare.numerics.loss_scale`): where the step's scalars have a `loss_scale`.

Backward starts from it, gradients are divided by it, and a step whose gradients overflowed changes nothing.

All engines are to skip the same steps. But the mean over half of a batch has gradients twice as large as that
half's share of the whole mean. So backward starts from the share: `parts` is the number of microbatches whose
means are averaged, divided by the replicas whose mean the loss already is.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Scalars = dict[str, Any]


def scaled(loss: Callable[..., jax.Array], scalars: Scalars, *, parts: float = 1) -> Callable[..., jax.Array]:
    """The loss, the mean over a microbatch, with gradients multiplied by the scale over `parts`."""
    if "loss_scale" not in scalars:
        return loss
    return lambda *arguments: _scale_gradient(loss(*arguments), scalars["loss_scale"] / parts)


def unscaled(gradients: Any, scalars: Scalars, *, parts: float = 1) -> Any:
    """Gradients of a scaled loss over its scale; an overflow stays infinite or NaN."""
    if "loss_scale" not in scalars:
        return gradients
    return jax.tree.map(lambda g: g / (scalars["loss_scale"] / parts), gradients)


def unless_overflowed(after: Any, before: Any, *, grad_norm: jax.Array, scalars: Scalars) -> Any:
    """The state after a step, or, with a loss scale and an infinite or NaN norm, the one before it."""
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
