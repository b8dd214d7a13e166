"""The contract's AdamW and SGD as optax transformations, and clipping by a norm that is handed in.

Why not optax.adamw and optax.clip_by_global_norm: optax computes 1 - beta^t in float32 (off by 1e-5 at
t = 1), its clipping lacks PyTorch's 1e-6, and a norm over a sharded tree is a matter of the layout. Here
the step's scalars come from the host in doubles, and the norm from the engine, which knows the layout.

Formulas: `compare.numerics.optimizer`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from compare.numerics.optimizer import CLIP_EPS, moment_names
from compare.spec.experiment import Optimizer


def make_optimizer(spec: Optimizer, *, decay: Any) -> optax.GradientTransformationExtraArgs:
    """The experiment's optimizer: `update(gradients, state, params, *, grad_norm, scalars)`.

    It takes the global norm before clipping, and `compare.numerics.optimizer.StepScalars` as a dict.
    `decay` is a tree of bools like the parameters: whether a leaf decays (`weights.decay_mask`).
    """
    rule = adamw(spec, decay=decay) if spec.name == "adamw" else sgd(spec, decay=decay)
    return optax.chain(clip_by_given_norm(spec.grad_clip), rule)


def moments(state: Any) -> dict[str, Any]:
    """The moments in the state of `make_optimizer`: trees like the parameters, by name m and v.

    Raises:
        TypeError: the state is of another optimizer. Of optax's own it is not known which look beyond an
            element (norms, rows, means), of which a shard has a part.
    """
    named = state[-1] if isinstance(state, tuple) and state else None
    if not isinstance(named, dict):
        kind = type(state[-1] if named is None and isinstance(state, tuple) and state else state).__name__
        raise TypeError(
            f"the optimizer's state ends in {kind}: give one that keeps a dict of trees like the parameters "
            f"last, and treats elements one by one, as jaxpar.optimizer.make_optimizer's"
        )
    return named


def with_moments(state: Any, trees: dict[str, Any]) -> Any:
    """The state of `make_optimizer` with other moments."""
    return (*state[:-1], trees)


def state_like(optimizer: optax.GradientTransformationExtraArgs, params: Any, tree: Any) -> Any:
    """The state of `make_optimizer` with `tree` in place of every moment: for shardings and specs."""
    state = jax.eval_shape(optimizer.init, params)
    return with_moments(state, dict.fromkeys(moments(state), tree))


def global_norm(tree: Any) -> jax.Array:
    """Euclidean norm over all leaves, a scalar; every device holds each leaf whole."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def clip_by_given_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Every gradient times min(1, max_norm / (grad_norm + 1e-6)); 0 turns it off.

    By a norm that is not finite nothing is scaled: the run ends there, and NaN in every weight would hide
    whose gradient it was.
    """

    def update(updates: Any, state: Any, params: Any = None, **of_step: Any):
        if not max_norm:
            return updates, state
        norm = of_step["grad_norm"]
        scale = jnp.where(jnp.isfinite(norm), jnp.minimum(1.0, max_norm / (norm + CLIP_EPS)), 1.0)
        return jax.tree.map(lambda g: g * scale, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def adamw(spec: Optimizer, *, decay: Any) -> optax.GradientTransformationExtraArgs:
    """AdamW (arXiv 1711.05101) as in torch.optim.AdamW. State: {"m": tree, "v": tree}."""

    def update(updates: Any, state: Any, params: Any = None, **of_step: Any):
        scalars = of_step["scalars"]
        lr, correction1 = scalars["learning_rate"], scalars["bias_correction1"]
        root2 = jnp.sqrt(scalars["bias_correction2"])
        m = jax.tree.map(lambda m, g: spec.beta1 * m + (1 - spec.beta1) * g, state["m"], updates)
        v = jax.tree.map(lambda v, g: spec.beta2 * v + (1 - spec.beta2) * g * g, state["v"], updates)

        def change(w: jax.Array, m: jax.Array, v: jax.Array, decays: bool) -> jax.Array:
            adam = (m / correction1) / (jnp.sqrt(v) / root2 + spec.eps)
            return -lr * (adam + spec.weight_decay * w if decays else adam)

        return jax.tree.map(change, params, m, v, decay), {"m": m, "v": v}

    return optax.GradientTransformationExtraArgs(lambda params: _zero_moments(spec, params), update)


def sgd(spec: Optimizer, *, decay: Any) -> optax.GradientTransformationExtraArgs:
    """SGD with L2 decay and momentum as in torch.optim.SGD. State: {"m": tree}, or {} without momentum."""

    def update(updates: Any, state: Any, params: Any = None, **of_step: Any):
        def decayed(g: jax.Array, w: jax.Array, decays: bool) -> jax.Array:
            return g + spec.weight_decay * w if decays else g

        m = jax.tree.map(decayed, updates, params, decay)
        if "m" in state:
            m = jax.tree.map(lambda before, g: spec.momentum * before + g, state["m"], m)
            state = {"m": m}
        return jax.tree.map(lambda m: -of_step["scalars"]["learning_rate"] * m, m), state

    return optax.GradientTransformationExtraArgs(lambda params: _zero_moments(spec, params), update)


def _zero_moments(spec: Optimizer, params: Any) -> dict[str, Any]:
    return {name: jax.tree.map(jnp.zeros_like, params) for name in moment_names(spec)}
