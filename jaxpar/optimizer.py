"""The contract's AdamW and SGD (`compare.numerics.optimizer`), as functions on trees.

optax.adamw and optax.clip_by_global_norm do not fit. optax computes 1 - beta^t in float32, which is off by
1e-5 at t = 1. Its clipping lacks PyTorch's 1e-6, and its norm ignores the layout. Here the scalars of a step
come from the host in doubles, and the norm comes from the engine.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from compare.numerics.optimizer import CLIP_EPS, moment_names
from compare.spec import experiment as spec
from jaxpar.hooks import identity

Moments = dict[str, Any]
"""Trees like the parameters, by name: m and v of AdamW, m of SGD with momentum."""


class Optimizer(NamedTuple):
    """The functions of an optimizer."""

    init: Callable[[Any], Any]
    """init(params) -> the state before the first update."""
    update: Callable[..., tuple[Any, Any]]
    """update(gradients, state, params, norm, scalars) -> the changes of the parameters, and the state.

    `norm` is the global norm of the gradients, and `scalars` are `step_scalars`."""
    moments: Callable[[Any], Moments] = identity
    """moments(state) -> the moments by the contract's names."""


def make_optimizer(config: spec.Optimizer, *, decay: Any) -> Optimizer:
    """The experiment's optimizer. `decay` is a tree of bools like the parameters (`weights.decay_mask`)."""
    rule = adamw if config.name == "adamw" else sgd

    def init(params: Any) -> Moments:
        return {name: jax.tree.map(jnp.zeros_like, params) for name in moment_names(config)}

    def update(
        gradients: Any, moments: Moments, params: Any, norm: jax.Array, scalars: dict[str, Any]
    ) -> tuple[Any, Moments]:
        clipped = clip_gradients(gradients, norm, max_norm=config.grad_clip)
        return rule(config, clipped, moments, params, decay=decay, scalars=scalars)

    return Optimizer(init, update)


def global_norm(tree: Any) -> jax.Array:
    """Euclidean norm over all leaves, a scalar. Arrays are global."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def clip_gradients(gradients: Any, norm: jax.Array, *, max_norm: float) -> Any:
    """Every gradient times min(1, max_norm / (norm + 1e-6)); with a max_norm of 0 the gradients themselves.

    A norm that is not finite does not clip: NaN in every weight would hide which gradient was wrong.
    """
    if not max_norm:
        return gradients
    scale = jnp.where(jnp.isfinite(norm), jnp.minimum(1.0, max_norm / (norm + CLIP_EPS)), 1.0)
    return jax.tree.map(lambda g: g * scale, gradients)


def adamw(
    config: spec.Optimizer,
    gradients: Any,
    moments: Moments,
    params: Any,
    *,
    decay: Any,
    scalars: dict[str, Any],
) -> tuple[Any, Moments]:
    """Changes and moments of AdamW (arXiv 1711.05101), as in torch.optim.AdamW."""
    lr, correction1 = scalars["learning_rate"], scalars["bias_correction1"]
    root2 = jnp.sqrt(scalars["bias_correction2"])
    m = jax.tree.map(lambda m, g: config.beta1 * m + (1 - config.beta1) * g, moments["m"], gradients)
    v = jax.tree.map(lambda v, g: config.beta2 * v + (1 - config.beta2) * g * g, moments["v"], gradients)

    def change(w: jax.Array, m: jax.Array, v: jax.Array, decays: bool) -> jax.Array:
        adam = (m / correction1) / (jnp.sqrt(v) / root2 + config.eps)
        return -lr * (adam + config.weight_decay * w if decays else adam)

    return jax.tree.map(change, params, m, v, decay), {"m": m, "v": v}


def sgd(
    config: spec.Optimizer,
    gradients: Any,
    moments: Moments,
    params: Any,
    *,
    decay: Any,
    scalars: dict[str, Any],
) -> tuple[Any, Moments]:
    """Changes and moments of SGD with L2 decay and momentum, as in torch.optim.SGD."""

    def add_decay(g: jax.Array, w: jax.Array, decays: bool) -> jax.Array:
        return g + config.weight_decay * w if decays else g

    change = jax.tree.map(add_decay, gradients, params, decay)
    if "m" in moments:
        change = jax.tree.map(lambda before, g: config.momentum * before + g, moments["m"], change)
        moments = {"m": change}
    return jax.tree.map(lambda m: -scalars["learning_rate"] * m, change), moments
