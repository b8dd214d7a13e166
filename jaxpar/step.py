"""The training step of all engines: `train_step`. An engine adds four functions to it (`engine.Engine`).

In float16, backward starts from the loss times a scale (`compare.numerics.loss_scale`). The gradients are
divided by the scale. A step whose gradients overflow changes no weight and no moment. Each device begins with
its share of the mean over the whole batch, so that the same steps overflow on every layout.

Legend: A gradient accumulation, B batch, T position, L layers.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from compare.numerics.loss_scale import LARGEST
from jaxpar.hooks import identity
from jaxpar.mlp import Routing
from jaxpar.model import Loss

if TYPE_CHECKING:
    from jaxpar.engine import Engine


def train_step(
    engine: "Engine", params: Any, opt_state: Any, batch: dict[str, jax.Array], scalars: dict[str, jax.Array]
) -> tuple[Any, Any, dict[str, jax.Array], Any]:
    """One training step.

    Args:
        batch: "inputs" and "targets" (A, B, T); with dropout also "keys" (A, B, 2).
        scalars: of the optimizer and the loss scale (`programs.device_scalars`).

    Returns:
        Parameters, optimizer state, metrics, and gradients before clipping. Metrics are "loss" and
        "grad_norm"; with experts also "expert_ids" (A, L, B, T, k) and "tokens_per_expert" (L, E), int32.
    """
    scale = scalars["loss_scale"] / engine.averaged_losses if "loss_scale" in scalars else None
    # All messages of forward and backward, and the reduction of the gradients.
    (loss, routing), gradients = engine.gradients(params, batch, scale)
    if scale is not None:
        gradients = unscale_gradients(gradients, scale, largest=LARGEST / scalars["loss_scale"])
    norm = engine.norm(gradients)  # all-reduces of single numbers
    shards = engine.to_shards(params)  # slices: nothing is sent
    updates, new_state = engine.optimizer.update(gradients, opt_state, shards, norm, scalars)
    after = optax.apply_updates(shards, updates), new_state
    if scale is not None:
        is_finite = jnp.isfinite(norm)
        after = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), after, (shards, opt_state))
    shards, opt_state = after
    metrics = {"loss": loss, "grad_norm": norm}
    if routing.tokens_per_expert is not None:
        tokens_LE = routing.tokens_per_expert.sum(axis=0)
        metrics |= {"expert_ids": routing.expert_ids, "tokens_per_expert": tokens_LE}
    # ZeRO-1 and 2 all-gather the updated parameters (jax-compiler by the out_shardings of the jit).
    return engine.from_shards(shards), opt_state, metrics, gradients


def accumulate_gradients(
    loss: Loss,
    params: Any,
    batch: Any,
    *,
    scale: jax.Array | None = None,
    reduce: Callable[[Any], Any] = identity,
    finish: Callable[[Any], Any] = identity,
    like: Any = None,
) -> tuple[tuple[jax.Array, Routing], Any]:
    """Mean loss and mean gradients over the A microbatches of a batch (A, B, ...), one at a time.

    Args:
        scale: factor of the gradients in float16.
        reduce: applied to the gradients of each microbatch before they are added.
        finish: applied to the sum before it is divided by A. Engines reduce gradients here, or in `reduce`.
        like: a tree with the shapes of the accumulated gradients; by default `params`.

    Returns:
        The loss, a scalar, with the routing of all microbatches (A, L, ...); and the gradients.
    """
    value_and_grad = jax.value_and_grad(scale_loss(loss, scale), has_aux=True)
    accumulation = jax.tree.leaves(batch)[0].shape[0]
    if accumulation == 1:
        (value, routing), gradients = value_and_grad(params, jax.tree.map(lambda x: x[0], batch))
        return (value, jax.tree.map(lambda x: x[None], routing)), finish(reduce(gradients))

    def add(total: Any, microbatch: Any) -> tuple[Any, tuple[jax.Array, Routing]]:
        value, gradients = value_and_grad(params, microbatch)
        return jax.tree.map(lax.add, total, reduce(gradients)), value

    zeros = jax.tree.map(jnp.zeros_like, params if like is None else like)
    total, (losses_A, routing) = lax.scan(add, zeros, batch)
    return (losses_A.mean(), routing), jax.tree.map(lambda g: g / accumulation, finish(total))


def scale_loss(loss: Callable[..., tuple[jax.Array, Any]], scale: jax.Array | None) -> Callable[..., Any]:
    """The loss with gradients multiplied by `scale`; its value stays. Without a scale, the loss itself."""
    if scale is None:
        return loss

    def scaled_loss(*arguments: Any) -> tuple[jax.Array, Any]:
        value, routing = loss(*arguments)
        return _scale_gradient(value, scale), routing

    return scaled_loss


_scale_gradient = jax.custom_vjp(lambda value, scale: value)
_scale_gradient.defvjp(
    lambda value, scale: (value, scale),
    lambda scale, gradient: (gradient * scale, None),
)


def unscale_gradients(gradients: Any, scale: jax.Array, *, largest: jax.Array) -> Any:
    """Gradients divided by `scale`. An entry beyond `largest` becomes infinite: the step overflows."""

    def unscale(gradient: jax.Array) -> jax.Array:
        gradient = gradient / scale
        return jnp.where(jnp.abs(gradient) > largest, jnp.inf, gradient)

    return jax.tree.map(unscale, gradients)
