"""Experts under layouts against one device, in float64, and what is sent for them."""

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from msgspec.structs import replace

from compare.spec.experiment import Experiment, Layout
from jaxpar.engine import metrics_specs
from tests.support.jax_steps import ACCUMULATION as A
from tests.support.jax_steps import MODEL, B, C, Outcome, T, size_of, two_steps, worst_errors

L, E, K = 2, 4, 2
EXPERTS = replace(MODEL, n_layer=L, n_experts=E, experts_per_token=K, balance=0.1)
SPLIT = Layout(dp_shard=2, ep=2, zero=3, tp=2, sequence_parallel=True)
LAYOUTS = {
    "compiler": Layout(dp_replicate=2, dp_shard=2, ep=2),
    "explicit zero2": Layout(dp_shard=4, ep=2, zero=2),
    "explicit tp_sp": SPLIT,
    "manual tp_sp": SPLIT,
}


@pytest.fixture(scope="module", params=LAYOUTS)
def name(request):
    """A layout: its tests run one after another, so that it is compiled once."""
    return request.param


def outcome_of(name: str) -> Outcome:
    return two_steps(f"jax-{name.split()[0]}", LAYOUTS[name], model=EXPERTS)


def test_experts_equal_one_device(name):
    """Numbers, expert ids and the load-balance loss of the global batch are equal."""
    outcome = outcome_of(name)
    errors = worst_errors(outcome, EXPERTS)
    assert errors["0 expert_ids"] == errors["0 tokens_per_expert"] == 0
    assert max(errors.values()) <= 1e-10, errors  # measured: 1e-12, of weights
    experts_ALBTk = outcome.numbers["0 expert_ids"]
    assert experts_ALBTk.shape == (A, L, B, T, K)
    counts_LE = [np.bincount(layer.ravel()) for layer in experts_ALBTk.swapaxes(0, 1)]
    np.testing.assert_array_equal(outcome.numbers["0 tokens_per_expert"], counts_LE)


@pytest.mark.parametrize(
    ("fields", "rows", "positions"),
    [
        ({"tp": 2, "sequence_parallel": True}, None, "tp"),
        ({"tp": 2, "cp": 2, "sequence_parallel": True}, None, ("cp", "tp")),
        ({"dp_replicate": 2, "dp_shard": 2, "ep": 2, "cp": 2}, ("dp_replicate", "ep"), "cp"),
    ],
    ids=["tp", "cp_tp", "ep_cp"],
)
def test_choices_are_split_as_tokens(fields, rows, positions):
    experiment = Experiment(model=EXPERTS, layout=Layout(**fields))
    assert metrics_specs(experiment)["expert_ids"] == P(None, None, rows, positions)


def test_tokens_are_exchanged_once(name):
    """By hand and by types each device has room for all tokens of each other; the compiler gathers them."""
    ledger, layout = outcome_of(name).ledger, LAYOUTS[name]
    tokens = A * L * B // layout.data_parallel * T // (layout.tp if layout.sequence_parallel else 1)
    room, weights = 8 * layout.ep * tokens * C, 8 * tokens * E
    along_ep = {"axis": "ep", "kind": "all_gather" if name == "compiler" else "all_to_all"}
    sent = [size_of(ledger, purpose=why, **along_ep) for why in ("activations", "activation gradients")]
    if name == "compiler":
        weights *= layout.ep
        assert sent[0] == 2 * room + 2 * weights
        assert sent[1] in (room + weights, 2 * room + weights)  # for each of two products, or for both
        assert not size_of(ledger, kind="all_to_all", axis="ep")
    else:  # dots keeps no message: what went out goes again for backward
        assert sent == [3 * room + 2 * weights, 2 * room + weights]
