"""Sharded layouts against one device, in float64: numbers, bytes at rest, and what is communicated.

One model that nothing divides evenly (vocabulary, positions), in two microbatches.
"""

from functools import partial

import pytest
from jax_steps import ACCUMULATION as A
from jax_steps import Outcome, size_of, two_steps, worst_errors
from layouts import JAX as LAYOUTS

from compare.contract.engines import ENGINES
from compare.contract.experiment import Layout, Model
from compare.contract.parameters import parameter_count

L = 3
MODEL = Model(n_layer=L, n_head=2, n_embd=16, block_size=10, vocab_size=257, bias=True)
N = parameter_count(MODEL)
ENGINE_NAMES = [name for name, engine in ENGINES.items() if engine.side == "jaxpar"]


run = partial(two_steps, model=MODEL, batch_size=4)


def errors_of(outcome: Outcome) -> dict[str, float]:
    return worst_errors(outcome.numbers, run("jax-compiler", Layout()).numbers)


@pytest.mark.parametrize("engine", ENGINE_NAMES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_equals_one_device_and_is_really_split(engine, layout):
    outcome = run(engine, layout)
    errors, resident, ledger = errors_of(outcome), outcome.resident, outcome.ledger
    assert max(errors.values()) <= 1e-10, errors  # measured: 1e-15, and 1e-12 of weights, which Adam divides

    # Closed form: each of the three divided by the degrees that split it. Above it: what is repeated along
    # tp (norms, row biases, positions), and padding, of which these odd sizes have much.
    shards = {"parameters": layout.zero == 3, "gradients": layout.zero >= 2, "optimizer": layout.zero >= 1}
    for name, sharded in shards.items():
        least = 8 * N * (2 if name == "optimizer" else 1) / layout.tp / (layout.dp_shard if sharded else 1)
        assert len(set(resident[name])) == 1
        assert least <= resident[name][0] <= 1.15 * least, name
    assert not any(entry.axis == "?" for entry in ledger)
    # Under zero 2 XLA may exchange rows of the embedding's gradient along dp_shard: its choice.
    assert not any(entry.kind == "all_to_all" and "tp" in entry.axis for entry in ledger)


ALL, REST, LAST_BIAS = 8 * N, 8 * 16 * (257 + 10 + 2), 8 * 16 * L
"""Bytes of all parameters, of those outside the layers, and of the biases that no backward needs."""


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_zero3_gathers_again_in_backward_and_shard_grad_op_does_not(engine):
    for reshard in (True, False):
        layout = Layout(dp_shard=4, zero=3, reshard_after_forward=reshard)
        ledger = run(engine, layout).ledger
        layers = ALL - REST
        # Backward needs every weight but the last bias. What is outside the layers is gathered once for all
        # microbatches: XLA sees that it does not change.
        expected = REST + A * (2 * layers - LAST_BIAS if reshard else layers)
        assert size_of(ledger, axis="dp_shard", purpose="parameters") == expected


def test_by_hand_gradients_are_scattered_once_a_step_or_once_a_microbatch():
    for zero, times in {1: 1, 2: A, 3: A}.items():
        ledger = run("jax-manual", Layout(dp_shard=4, zero=zero)).ledger
        assert size_of(ledger, kind="reduce_scatter", purpose="gradients") == times * ALL
        assert size_of(ledger, kind="all_reduce", purpose="gradients") == 0


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_closed_form(sequence_parallel):
    """Per layer two regions, entered and left, forward and backward; one more for embedding and head."""
    layout = Layout(tp=2, sequence_parallel=sequence_parallel, remat="none")
    ledger = run("jax-manual", layout).ledger
    stream, positions = 8 * 4 * 10 * 16, 8 * 4 * 10
    borders = A * (4 * L + 2) * stream
    loss = A * 3 * positions  # maximum, normaliser, the target's logit; never the logits
    found = {e.kind: e.bytes for e in ledger if e.purpose == "activations"}
    if sequence_parallel:
        assert found == {"all_gather": borders, "reduce_scatter": borders, "all_reduce": loss}
        replicated = 8 * 16 * (L * 6 + 2 + 10)  # two norms and two row biases a layer, a norm, positions
        assert size_of(ledger, kind="all_reduce", purpose="gradients") == replicated
    else:
        assert found == {"all_reduce": borders + loss}


FAULTS = {
    "dropped_tp_all_reduce": (Layout(tp=2), "0 loss"),
    "doubled_row_bias": (Layout(tp=2), "0 gradient"),
    "missing_norm_psum": (Layout(tp=2, sequence_parallel=True), "0 gradient"),
    "norm_counts_replicas_twice": (Layout(dp_shard=2, zero=3, tp=2), "0 grad_norm"),
    "wrong_optimizer_shard": (Layout(dp_shard=2, zero=2), "0 weight"),
}
ORDER = ("0 loss", "0 gradient", "0 grad_norm", "0 weight")


@pytest.mark.parametrize(("fault", "layout", "rung"), [(f, *rest) for f, rest in FAULTS.items()], ids=FAULTS)
def test_faults_show_first_where_they_belong(fault, layout, rung):
    errors = errors_of(run("jax-manual", layout, fault=fault))
    assert next(kind for kind in ORDER if errors[kind] > 1e-10) == rung
    assert errors[rung] > 1e-4
