"""plain-jit: one device and one jitted step, as a tutorial has it: value_and_grad, optax, donation.

Neither mesh nor sharding. Not optax's own is clipping: PyTorch's 1e-6 beside the norm shows.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import SingleDeviceSharding

from compare.contract.record import Recorder
from compare.contract.request import Request
from compare.contract.timing import Stopwatch
from compare.numerics.data import open_corpus
from compare.numerics.parameters import fingerprint
from compare.side.inputs import starting_parameters
from compare.spec.experiment import Optimizer
from jaxpar import weights as names
from jaxpar.comm.mesh import find_devices
from jaxpar.hooks import Hooks
from jaxpar.measure.work import work_of
from jaxpar.model import loss_function
from jaxpar.optimizer import clip, global_norm
from jaxpar.placement import place_parameters
from jaxpar.remat import remat_of
from jaxpar.run import Run
from jaxpar.step import ShardedStep, TrainState, accumulated_gradients, batch_like, device_scalars
from jaxpar.train import train_to_end


def make_optimizer(config: Optimizer, *, decay: Any) -> optax.GradientTransformation:
    """AdamW or SGD of optax. `decay` is a tree of bools like the parameters."""
    rate = learning_rate_of(config)
    if config.name == "adamw":
        b1, b2, weight_decay = config.beta1, config.beta2, config.weight_decay
        return optax.adamw(rate, b1, b2, eps=config.eps, weight_decay=weight_decay, mask=decay)
    momentum = optax.trace(config.momentum) if config.momentum else optax.identity()
    decayed = optax.add_decayed_weights(config.weight_decay, mask=decay)
    return optax.chain(decayed, momentum, optax.scale_by_learning_rate(rate))


def learning_rate_of(config: Optimizer) -> optax.Schedule:
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
    """The moments that optax keeps, by the contract's names: m and v, m of SGD with momentum, or none."""
    names = [("m", "mu"), ("m", "trace"), ("v", "nu")]
    trees = [(name, optax.tree_utils.tree_get(opt_state, key)) for name, key in names]
    return {name: tree for name, tree in trees if tree is not None}


def train(request: Request, folder: Path, *, at: Callable[[int, str], None] = lambda *_: None) -> None:
    """Train on one device, and write the record: see `jaxpar.train.train`."""
    experiment, recorder = request.experiment, Recorder(folder)
    (device,) = find_devices(1, platform=request.platform)
    loss = loss_function(experiment, Hooks(remat=remat_of(experiment.layout)))
    decay = names.decay_mask(experiment.model, experiment.optimizer.decay)
    optimizer = make_optimizer(experiment.optimizer, decay=decay)
    corpus = open_corpus(experiment, validated_sha256=request.corpus_sha256)
    initial = starting_parameters(request)

    def step(params: Any, opt_state: Any, batch: Any, scalars: Any) -> tuple[Any, Any, dict[str, jax.Array]]:
        (value, _), gradients = accumulated_gradients(loss, params, batch)
        norm = global_norm(gradients)
        clipped = clip(gradients, norm, max_norm=experiment.optimizer.grad_clip)
        updates, opt_state = optimizer.update(clipped, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": value, "grad_norm": norm}

    params = jax.device_put(names.from_canonical(initial, experiment.model), device)
    state = TrainState(params=params, opt_state=jax.jit(optimizer.init)(params))
    like, clock = batch_like(experiment), Stopwatch()
    like.pop("keys", None)
    with clock:
        traced = jax.jit(step, donate_argnums=(0, 1)).trace(
            state.params, state.opt_state, like, device_scalars(experiment, state)
        )
        recorder.leave(work_of(traced.jaxpr))
        compiled = traced.lower().compile()

    here = SingleDeviceSharding(device)
    everywhere = jax.tree.map(lambda leaf: here, params)
    trees = dict.fromkeys(("params", "moments", "gradients", "accumulated"), everywhere)
    run = Run(
        request=request,
        corpus=corpus,
        mesh_devices=[device],
        sharded=ShardedStep(
            step=step,
            placements=place_parameters(experiment),
            batch=dict.fromkeys(("inputs", "targets"), here),
            scalars=here,
            **trees,
        ),
        state=state,
        step=compiled,
        compile_s=clock.wall_s,
        initial_weights_sha256=fingerprint(names.to_canonical(params, experiment.model)),
        # Apart from the step, which is left as a user would have it.
        gradients=jax.jit(lambda *of: accumulated_gradients(loss, *of)[1]),
        moments=moments,
    )
    train_to_end(run, recorder, folder, at)
