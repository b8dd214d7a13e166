"""jaxpar's optimizers against the contract's NumPy definition, step by step in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from compare.contract.recording import Progress
from compare.numerics.optimizer import global_norm as reference_norm
from compare.numerics.optimizer import reference_step
from compare.numerics.parameters import initial_parameters, parameter_table
from compare.spec.experiment import Experiment, Model, Optimizer, Precision
from jaxpar import weights
from jaxpar.optimizer import global_norm, make_optimizer
from jaxpar.step import device_scalars

SPEC = Model(n_layer=2, n_head=2, n_embd=8, block_size=6, vocab_size=11, bias=True)
TABLE = parameter_table(SPEC)
STEPS = 5
# Clipping at 1 scales these gradients; at 1e3 it must leave them alone; 0 turns it off.
OPTIMIZERS = {
    "adamw": Optimizer(),
    "adamw, decay everywhere, clipping idle": Optimizer(decay="all", grad_clip=1e3, beta2=0.999),
    "sgd": Optimizer(name="sgd", grad_clip=0.0),
    "sgd with momentum": Optimizer(name="sgd", momentum=0.9, decay_lr=False),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_equals_the_definition(optimizer):
    experiment = Experiment(model=SPEC, optimizer=optimizer, precision=Precision(dtype="float64"))
    named, named_moments = initial_parameters(experiment), {}
    rule = make_optimizer(optimizer, decay=weights.decay_mask(SPEC, optimizer.decay))
    params = jax.tree.map(jnp.asarray, weights.from_canonical(named, SPEC))
    state = rule.init(params)
    update = jax.jit(rule.update)
    generator = np.random.default_rng(0)
    for step in range(STEPS):
        named_gradients = {name: generator.normal(size=w.shape) for name, w in named.items()}
        gradients = jax.tree.map(jnp.asarray, weights.from_canonical(named_gradients, SPEC))
        named, named_moments = reference_step(optimizer, TABLE, named, named_gradients, named_moments, step)
        norm = global_norm(gradients)
        assert float(norm) == pytest.approx(reference_norm(named_gradients), rel=1e-14)
        updates, state = update(
            gradients,
            state,
            params,
            grad_norm=norm,
            scalars=device_scalars(experiment, Progress(step=step, updates=step)),
        )
        params = optax.apply_updates(params, updates)
    assert set(state) == set(named_moments)
    pairs = [(params, named)] + [(state[which], named_moments[which]) for which in named_moments]
    for tree, expected in pairs:
        for name, tensor in weights.to_canonical(tree, SPEC).items():
            np.testing.assert_allclose(tensor, expected[name], rtol=1e-12, atol=1e-15, err_msg=name)


def test_a_gradient_that_is_not_finite_spoils_its_own_weight_only():
    """A run that diverged names it by what became of the weights."""
    experiment = Experiment(model=SPEC, precision=Precision(dtype="float64"))
    rule = make_optimizer(experiment.optimizer, decay=weights.decay_mask(SPEC, "matrices"))
    params = weights.from_canonical(initial_parameters(experiment), SPEC)
    gradients = jax.tree.map(np.ones_like, params)
    state, update, scalars = rule.init(params), jax.jit(rule.update), device_scalars(experiment, Progress())
    for bad in (np.nan, np.inf):
        gradients["blocks"]["mlp"]["up"]["bias"][1, 0] = bad
        updates, _ = update(gradients, state, params, grad_norm=bad, scalars=scalars)
        change = weights.to_canonical(updates, SPEC)
        assert [name for name in change if not np.isfinite(change[name]).all()] == ["blocks.1.mlp.up.bias"]
