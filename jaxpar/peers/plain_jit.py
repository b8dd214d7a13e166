"""plain-jit: one jitted step on one device, as in a tutorial: value_and_grad, optax, donation.

Clipping is our own: PyTorch adds 1e-6 to the norm, and optax does not.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from compare.spec import experiment as spec
from compare.spec.experiment import Experiment
from jaxpar.attention import attention_core
from jaxpar.engine import Engine
from jaxpar.hooks import Hooks
from jaxpar.model import LossOf, loss_function
from jaxpar.optimizer import Optimizer, clip_gradients, global_norm
from jaxpar.placement import place_parameters
from jaxpar.remat import remat_of
from jaxpar.step import accumulate_gradients
from jaxpar.weights import decay_mask


def make_optimizer(config: spec.Optimizer, *, decay: Any) -> optax.GradientTransformation:
    """optax's AdamW or SGD. `decay` is a tree of bools like the parameters."""
    rate = learning_rate_of(config)
    if config.name == "adamw":
        b1, b2, weight_decay = config.beta1, config.beta2, config.weight_decay
        return optax.adamw(rate, b1, b2, eps=config.eps, weight_decay=weight_decay, mask=decay)
    momentum = optax.trace(config.momentum) if config.momentum else optax.identity()
    decayed = optax.add_decayed_weights(config.weight_decay, mask=decay)
    return optax.chain(decayed, momentum, optax.scale_by_learning_rate(rate))


def learning_rate_of(config: spec.Optimizer) -> optax.Schedule:
    """nanoGPT's schedule: linear warm-up, then a cosine down to min_lr."""
    peak, low, warmup = config.learning_rate, config.min_lr, config.warmup_iters
    length = float(max(config.lr_decay_iters - warmup, 1))  # a quotient of integers would be float32

    def schedule(count: Any) -> jax.Array:
        done = jnp.clip((count - warmup) / length, 0.0, 1.0)
        cosine = low + 0.5 * (1.0 + jnp.cos(jnp.pi * done)) * (peak - low)
        cosine = jnp.where(count >= config.lr_decay_iters, low, cosine)
        return jnp.where(count < warmup, peak * (count + 1) / (warmup + 1), cosine)

    return schedule if config.decay_lr else optax.constant_schedule(peak)


def moments(opt_state: Any) -> dict[str, Any]:
    """optax's moments by the contract's names: m and v of AdamW, m of SGD with momentum."""
    names = [("m", "mu"), ("m", "trace"), ("v", "nu")]
    trees = [(name, optax.tree_utils.tree_get(opt_state, key)) for name, key in names]
    return {name: tree for name, tree in trees if tree is not None}


def make_engine(experiment: Experiment, mesh: Mesh, _: Optimizer, loss_of: LossOf = loss_function) -> Engine:
    """plain-jit, for an experiment and a mesh of one device. optax updates the parameters."""
    decay = decay_mask(experiment.model, experiment.optimizer.decay)
    rule, loss = (
        make_optimizer(experiment.optimizer, decay=decay),
        loss_of(
            experiment,
            Hooks(remat=remat_of(experiment.layout), core=attention_core(experiment)),
        ),
    )

    def update(gradients: Any, opt_state: Any, params: Any, norm: jax.Array, _: Any) -> tuple[Any, Any]:
        clipped = clip_gradients(gradients, norm, max_norm=experiment.optimizer.grad_clip)
        return rule.update(clipped, opt_state, params)

    return Engine(
        gradients=lambda params, batch, _: accumulate_gradients(loss, params, batch),
        norm=global_norm,
        optimizer=Optimizer(rule.init, update, moments),
        experiment=experiment,
        mesh=mesh,
        placements=place_parameters(experiment),
    )
