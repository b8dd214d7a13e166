"""jaxpar's update where a gradient is not finite. The rung `updates` holds it to its definition."""

import jax
import numpy as np

from compare.numerics.loss_scale import LARGEST
from compare.numerics.parameters import initial_parameters
from compare.side.recording import Progress
from compare.spec.experiment import Experiment, Model, Precision
from jaxpar import weights
from jaxpar.optimizer import make_optimizer
from jaxpar.programs import device_scalars
from jaxpar.step import unscale_gradients

SPEC = Model(n_layer=2, n_head=2, n_embd=8, block_size=6, vocab_size=11, bias=True)


def test_nan_gradient_changes_its_weight_alone():
    """A run that diverged names it by what became of the weights."""
    experiment = Experiment(model=SPEC, precision=Precision(dtype="float64"))
    rule = make_optimizer(experiment.optimizer, decay=weights.decay_mask(SPEC, "matrices"))
    params = weights.from_canonical(initial_parameters(experiment), SPEC)
    gradients = jax.tree.map(np.ones_like, params)
    state, update, scalars = rule.init(params), jax.jit(rule.update), device_scalars(experiment, Progress())
    for bad in (np.nan, np.inf):
        gradients["blocks"]["mlp"]["up"]["bias"][1, 0] = bad
        updates, _ = update(gradients, state, params, bad, scalars)
        change = weights.to_canonical(updates, SPEC)
        assert [name for name in change if not np.isfinite(change[name]).all()] == ["blocks.1.mlp.up.bias"]


def test_gradient_that_exceeds_float16_is_infinite():
    """A sum over devices can exceed float16 where no part does: one device would overflow."""
    largest = LARGEST / 2.0**16
    gradients = {"w": np.array([1.0, -largest, np.nan, 3 * largest, -3 * largest]) * 2.0**14}
    found = unscale_gradients(gradients, 2.0**14, largest=largest)["w"]
    np.testing.assert_array_equal(found, [np.inf, -largest, np.nan, np.inf, np.inf])
