"""The contract's AdamW and SGD (`compare.numerics.optimizer`) as optax transformations.

Not optax.adamw and optax.clip_by_global_norm: optax computes 1 - beta^t in float32 (off by 1e-5 at t = 1),
its clipping lacks PyTorch's 1e-6, and a norm over a sharded tree is a matter of the layout. Here the step's
scalars come from the host in doubles, and the norm from the engine, which knows the layout.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from compare.numerics.optimizer import CLIP_EPS, moment_names
from compare.spec.experiment import Optimizer

Moments = dict[str, Any]
"""Trees like the parameters by name: m and v of AdamW, m of SGD with momentum."""


def make_optimizer(spec: Optimizer, *, decay: Any) -> optax.GradientTransformationExtraArgs:
    """The experiment's optimizer: `update(gradients, moments, params, *, grad_norm, scalars)`.

    `grad_norm` is that before clipping, `scalars` are `step_scalars`, `decay` a `weights.decay_mask`.
    """
    rule = adamw if spec.name == "adamw" else sgd

    def init(params: Any) -> Moments:
        return {name: jax.tree.map(jnp.zeros_like, params) for name in moment_names(spec)}

    def update(updates: Any, state: Any, params: Any = None, **of_step: Any) -> tuple[Any, Moments]:
        clipped = clip(updates, of_step["grad_norm"], max_norm=spec.grad_clip)
        return rule(spec, clipped, state, params, decay=decay, scalars=of_step["scalars"])

    return optax.GradientTransformationExtraArgs(init, update)


def moments_like(optimizer: optax.GradientTransformationExtraArgs, params: Any, tree: Any) -> Moments:
    """`tree` in place of every moment."""
    return dict.fromkeys(jax.eval_shape(optimizer.init, params), tree)


def global_norm(tree: Any) -> jax.Array:
    """Euclidean norm over all leaves, a scalar; every device holds each leaf whole."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def clip(gradients: Any, norm: jax.Array, *, max_norm: float) -> Any:
    """Every gradient times min(1, max_norm / (norm + 1e-6)); 0 turns it off.

    Not by a norm that is not finite, where a run ends: NaN in every weight would hide whose gradient it was.
    """
    if not max_norm:
        return gradients
    scale = jnp.where(jnp.isfinite(norm), jnp.minimum(1.0, max_norm / (norm + CLIP_EPS)), 1.0)
    return jax.tree.map(lambda g: g * scale, gradients)


def adamw(
    spec: Optimizer, gradients: Any, moments: Moments, params: Any, *, decay: Any, scalars: dict[str, Any]
) -> tuple[Any, Moments]:
    """AdamW (arXiv 1711.05101) as in torch.optim.AdamW."""
    lr, correction1 = scalars["learning_rate"], scalars["bias_correction1"]
    root2 = jnp.sqrt(scalars["bias_correction2"])
    m = jax.tree.map(lambda m, g: spec.beta1 * m + (1 - spec.beta1) * g, moments["m"], gradients)
    v = jax.tree.map(lambda v, g: spec.beta2 * v + (1 - spec.beta2) * g * g, moments["v"], gradients)

    def change(w: jax.Array, m: jax.Array, v: jax.Array, decays: bool) -> jax.Array:
        adam = (m / correction1) / (jnp.sqrt(v) / root2 + spec.eps)
        return -lr * (adam + spec.weight_decay * w if decays else adam)

    return jax.tree.map(change, params, m, v, decay), {"m": m, "v": v}


def sgd(
    spec: Optimizer, gradients: Any, moments: Moments, params: Any, *, decay: Any, scalars: dict[str, Any]
) -> tuple[Any, Moments]:
    """SGD with L2 decay and momentum as in torch.optim.SGD."""

    def decayed(g: jax.Array, w: jax.Array, decays: bool) -> jax.Array:
        return g + spec.weight_decay * w if decays else g

    change = jax.tree.map(decayed, gradients, params, decay)
    if "m" in moments:
        change = jax.tree.map(lambda before, g: spec.momentum * before + g, moments["m"], change)
        moments = {"m": change}
    return jax.tree.map(lambda m: -scalars["learning_rate"] * m, change), moments
