"""Definition of one optimizer step, which both sides implement: the harness's oracle.

AdamW (Loshchilov and Hutter, arXiv 1711.05101, as in torch.optim.AdamW), with g the clipped gradient,
t = updates + 1 and lr from `learning_rate`:

    w <- w (1 - lr * weight_decay)                    where the parameter decays
    m <- beta1 m + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2
    w <- w - lr * (m / (1 - beta1^t)) / (sqrt(v) / sqrt(1 - beta2^t) + eps)

SGD (as in torch.optim.SGD): g <- g + weight_decay w, m <- momentum m + g, w <- w - lr m.

Clipping: every gradient times min(1, grad_clip / (norm + 1e-6)), with norm over all parameters, each
counted once. This is torch.nn.utils.clip_grad_norm_; optax has no 1e-6.
"""

import math
from collections.abc import Mapping

import numpy as np

from compare.numerics.parameters import Parameter, decays
from compare.spec.experiment import Optimizer

CLIP_EPS = 1e-6


def learning_rate(optimizer: Optimizer, step: int) -> float:
    """Learning rate of `step`, from 0, in float64: warm-up, then a cosine (nanoGPT's `get_lr(iter_num)`)."""
    peak, low = optimizer.learning_rate, optimizer.min_lr
    if not optimizer.decay_lr:
        return peak
    if step < optimizer.warmup_iters:
        return peak * (step + 1) / (optimizer.warmup_iters + 1)  # never 0, so that the first step moves
    if step >= optimizer.lr_decay_iters:
        return low
    progress = (step - optimizer.warmup_iters) / (optimizer.lr_decay_iters - optimizer.warmup_iters)
    return low + 0.5 * (1.0 + math.cos(math.pi * progress)) * (peak - low)


def step_scalars(optimizer: Optimizer, step: int, updates: int) -> dict[str, float]:
    """Scalars of a step after `updates` updates: learning rate, 1 - beta1^t and 1 - beta2^t, t = updates + 1.

    They are computed in float64: in float32 1 - beta^t has an error of 1e-5 at t = 1 for beta = 0.999.
    """
    return {
        "learning_rate": learning_rate(optimizer, step),
        "bias_correction1": 1.0 - optimizer.beta1 ** (updates + 1),
        "bias_correction2": 1.0 - optimizer.beta2 ** (updates + 1),
    }


def moment_names(optimizer: Optimizer) -> tuple[str, ...]:
    """The moments that the optimizer keeps: m and v for AdamW, m for SGD with momentum, else none."""
    if optimizer.name == "adamw":
        return ("m", "v")
    return ("m",) if optimizer.momentum else ()


def global_norm(gradients: Mapping[str, np.ndarray]) -> float:
    """Euclidean norm over all gradients, any shapes, accumulated in float64."""
    return float(np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in gradients.values())))


def reference_step(
    optimizer: Optimizer,
    table: tuple[Parameter, ...],
    weights: Mapping[str, np.ndarray],
    gradients: Mapping[str, np.ndarray],
    moments: Mapping[str, Mapping[str, np.ndarray]],
    step: int,
    *,
    updates: int | None = None,
    norm: float | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
    """One optimizer step in NumPy, the oracle of the rung `updates` and of tests.

    Args:
        table: the canonical parameters; decides what decays.
        weights: canonical name -> tensor of the table's shape; so are gradients, before clipping.
        moments: m and v by name of the moment, then by canonical name; {} before the first update.
        step: number of finished steps.
        updates: number of finished steps that were not skipped; by default all.
        norm: norm of all gradients, if `gradients` are only some of them.

    Returns:
        The new weights and the new moments.
    """
    scalars = step_scalars(optimizer, step, step if updates is None else updates)
    scale = 1.0
    if optimizer.grad_clip:
        norm = global_norm(gradients) if norm is None else norm
        scale = min(1.0, optimizer.grad_clip / (norm + CLIP_EPS))
    new_weights, new_moments = {}, {name: {} for name in moment_names(optimizer)}
    for parameter in table:
        name = parameter.name
        weight, gradient = weights[name], gradients[name] * scale
        decay = optimizer.weight_decay if decays(parameter, optimizer.decay) else 0.0
        before = {which: moments[which][name] if moments else np.zeros_like(weight) for which in new_moments}
        if optimizer.name == "adamw":
            m = optimizer.beta1 * before["m"] + (1 - optimizer.beta1) * gradient
            v = optimizer.beta2 * before["v"] + (1 - optimizer.beta2) * gradient**2
            denominator = np.sqrt(v) / np.sqrt(scalars["bias_correction2"]) + optimizer.eps
            update = (m / scalars["bias_correction1"]) / denominator
            weight = weight * (1 - scalars["learning_rate"] * decay)
            after = {"m": m, "v": v}
        else:
            update = gradient + decay * weight
            if "m" in before:
                update = optimizer.momentum * before["m"] + update
            after = {"m": update}
        new_weights[name] = weight - scalars["learning_rate"] * update
        for which in new_moments:
            new_moments[which][name] = after[which]
    return new_weights, new_moments
