"""Experts under layouts against one device, in float64: the load-balance loss is that of the global batch."""

import numpy as np
from jax_steps import ACCUMULATION, MODEL, B, T, two_steps, worst_errors
from msgspec.structs import replace

from compare.spec.experiment import Layout

EXPERTS = replace(MODEL, n_layer=2, n_experts=4, balance=0.1)
SPLIT = {"dp_replicate": 2, "tp": 2, "sequence_parallel": True}
LAYOUTS = (
    ("jax-compiler", Layout(dp_replicate=2, dp_shard=2, zero=1)),
    ("jax-explicit", Layout(**SPLIT)),
    ("jax-manual", Layout(**SPLIT)),
)


def test_experts_under_layouts_equal_one_device():
    for engine, layout in LAYOUTS:
        outcome = two_steps(engine, layout, model=EXPERTS)
        errors = worst_errors(outcome, model=EXPERTS)
        assert max(errors.values()) <= 1e-10, (engine, errors)  # measured: 1e-12, of weights
        experts_ALBTk = outcome.numbers["0 experts"]
        assert experts_ALBTk.shape == (ACCUMULATION, 2, B, T, 2)
        counts_LE = [np.bincount(layer.ravel()) for layer in experts_ALBTk.swapaxes(0, 1)]
        np.testing.assert_array_equal(outcome.numbers["0 tokens_per_expert"], counts_LE)
