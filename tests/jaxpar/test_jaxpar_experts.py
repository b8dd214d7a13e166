"""Experts under layouts against one device, in float64, and what is sent for them."""

import numpy as np
from jax.sharding import PartitionSpec as P
from msgspec.structs import replace

from compare.spec.experiment import Experiment, Layout
from jaxpar.engine import metrics_specs
from tests.support.jax_steps import ACCUMULATION as A
from tests.support.jax_steps import MODEL, B, C, T, size_of, two_steps, worst_errors

L, E, K = 2, 4, 2
EXPERTS = replace(MODEL, n_layer=L, n_experts=E, experts_per_token=K, balance=0.1)
SPLIT = Layout(dp_shard=2, ep=2, zero=3, tp=2, sequence_parallel=True)
LAYOUTS = (
    ("jax-compiler", Layout(dp_replicate=2, dp_shard=2, ep=2)),
    ("jax-explicit", Layout(dp_shard=4, ep=2, zero=2)),
    ("jax-explicit", SPLIT),
    ("jax-manual", SPLIT),
)


def test_sharded_experts_equal_one_device():
    """Numbers, expert ids and the load-balance loss of the global batch are equal."""
    for engine, layout in LAYOUTS:
        outcome = two_steps(engine, layout, model=EXPERTS)
        errors = worst_errors(outcome, EXPERTS)
        assert errors["0 expert_ids"] == errors["0 tokens_per_expert"] == 0
        assert max(errors.values()) <= 1e-10, (engine, errors)  # measured: 1e-12, of weights
        experts_ALBTk = outcome.numbers["0 expert_ids"]
        assert experts_ALBTk.shape == (A, L, B, T, K)
        counts_LE = [np.bincount(layer.ravel()) for layer in experts_ALBTk.swapaxes(0, 1)]
        np.testing.assert_array_equal(outcome.numbers["0 tokens_per_expert"], counts_LE)


def test_choices_are_split_as_tokens():
    for fields, rows, positions in (
        ({"tp": 2, "sequence_parallel": True}, None, "tp"),
        ({"tp": 2, "cp": 2, "sequence_parallel": True}, None, ("cp", "tp")),
        ({"dp_replicate": 2, "dp_shard": 2, "ep": 2, "cp": 2}, ("dp_replicate", "ep"), "cp"),
    ):
        experiment = Experiment(model=EXPERTS, layout=Layout(**fields))
        assert metrics_specs(experiment)["expert_ids"] == P(None, None, rows, positions), fields


def test_tokens_are_exchanged_once():
    """By hand and by types each device has room for all tokens of each other; the compiler gathers them."""
    for engine, layout in LAYOUTS:
        ledger = two_steps(engine, layout, model=EXPERTS).ledger
        tokens = A * L * B // layout.data_parallel * T // (layout.tp if layout.sequence_parallel else 1)
        room, weights = 8 * layout.ep * tokens * C, 8 * tokens * E
        along_ep = {"axis": "ep", "kind": "all_gather" if engine == "jax-compiler" else "all_to_all"}
        sent = [size_of(ledger, purpose=why, **along_ep) for why in ("activations", "activation gradients")]
        if engine == "jax-compiler":
            weights *= layout.ep
            assert sent[0] == 2 * room + 2 * weights
            assert sent[1] in (room + weights, 2 * room + weights)  # for each of two products, or for both
            assert not size_of(ledger, kind="all_to_all", axis="ep")
        else:  # dots keeps no message: what went out goes again for backward
            assert sent == [3 * room + 2 * weights, 2 * room + weights]
