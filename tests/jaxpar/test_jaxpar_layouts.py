"""Sharded layouts against one device, in float64: numbers, bytes at rest, and what is communicated.

One model that nothing divides evenly (vocabulary, positions), in two microbatches.
"""

from functools import partial

import jax_steps
import pytest
from jax_steps import ACCUMULATION as A
from jax_steps import Outcome, size_of, two_steps, worst_errors
from layouts import JAX as LAYOUTS
from msgspec.structs import replace

from compare.judge.across_hosts import crossings
from compare.judge.closed_forms.across_hosts import host_of
from compare.judge.closed_forms.communication import data_parallel, fully_sharded, measured, tensor_parallel
from compare.judge.ledger_lines import line_up
from compare.judge.strategy import with_remat_resolved
from compare.numerics.parameters import parameter_count
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import Layout, Model
from jaxpar.measure.hlo import collectives
from jaxpar.measure.ledger import communications

L = 3
MODEL = Model(n_layer=L, n_head=2, n_embd=16, block_size=10, vocab_size=257, bias=True)
N = parameter_count(MODEL)
ENGINE_NAMES = [name for name, engine in STUDIED.items() if engine.side == "jaxpar"]


run = partial(two_steps, model=MODEL, batch_size=4)
experiment_of = partial(jax_steps.experiment_of, model=MODEL, batch_size=4)


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


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_zero3_gathers_again_in_backward_and_shard_grad_op_does_not(engine):
    for reshard in (True, False):
        layout = Layout(dp_shard=4, zero=3, reshard_after_forward=reshard)
        ledger = run(engine, layout).ledger
        # XLA comes to the same by itself: it sees that what is outside the layers does not change.
        expected = fully_sharded("jax-manual", experiment_of(layout))["all_gather", "dp_shard", "parameters"]
        assert size_of(ledger, axis="dp_shard", purpose="parameters") == expected


@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_only_layer_is_gathered_once_a_step(remat):
    """XLA unrolls a scan of one layer, and then sees that what is gathered does not change."""
    layout, model = Layout(dp_shard=4, zero=3, remat=remat), replace(MODEL, n_layer=1)
    ledger = two_steps("jax-manual", layout, model=model, batch_size=4).ledger
    experiment = jax_steps.experiment_of(layout, model=model, batch_size=4)
    expected = fully_sharded("jax-manual", experiment)["all_gather", "dp_shard", "parameters"]
    assert size_of(ledger, axis="dp_shard", purpose="parameters") == expected


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_by_hand_gradients_are_scattered_once_a_step_or_once_a_microbatch(zero):
    layout = Layout(dp_shard=4, zero=zero)
    expected = fully_sharded("jax-manual", experiment_of(layout))
    ledger = run("jax-manual", layout).ledger
    assert {item: size for item, size in measured(ledger).items() if item in expected} == expected
    assert expected["reduce_scatter", "dp_shard", "gradients"] == 8 * N * (1 if zero == 1 else A)
    assert size_of(ledger, kind="all_reduce", purpose="gradients") == 0


def test_by_hand_replicas_reduce_what_was_scattered_before():
    found = measured(run("jax-manual", LAYOUTS["hsdp"]).ledger)
    for item, size in data_parallel("jax-manual", experiment_of(LAYOUTS["hsdp"])).items():
        assert found[item] == pytest.approx(size, rel=0.02)  # of three-layer leaves shards are padded


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_closed_form(sequence_parallel):
    layout = Layout(tp=2, sequence_parallel=sequence_parallel, remat="none")
    found = measured(run("jax-manual", layout).ledger)
    norm = found.pop(("all_reduce", "tp", "norm"))
    assert (norm, found) == (8, tensor_parallel("jax-manual", experiment_of(layout)))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_by_hand_every_collective_says_what_it_is_for(layout):
    """So that the ledger infers nothing, and takes nothing small for a metric."""
    silent = [
        found
        for found in collectives(run("jax-manual", layout).hlo, layout.axes)
        if max(map(len, found.groups)) > 1 and not found.purpose
    ]
    assert silent == []


WITH_CLOSED_FORM = {name: layout for name, layout in LAYOUTS.items() if layout.remat != "full"}


@pytest.mark.parametrize("layout", WITH_CLOSED_FORM.values(), ids=WITH_CLOSED_FORM)
def test_what_crosses_two_hosts_is_the_closed_form(layout):
    """Read from the groups of XLA's program; with devices dealt out one by one it is not.

    But for a ring of all devices, which crosses as often wherever they are.
    """
    hlo, experiment = run("jax-manual", layout).hlo, with_remat_resolved("jax-manual", experiment_of(layout))
    devices = range(layout.devices)

    def wrong(hosts: list[int]) -> list[str]:
        rows = communications(hlo, layout.axes, hosts=hosts)
        found = crossings("jax-manual", experiment, line_up("jax-manual", experiment, rows), rows, 2)
        assert any(one.found for one in found)
        return [str(one) for one in found if not one.is_as_expected]

    assert wrong([host_of(device, layout, 2) for device in devices]) == []
    is_one_ring = sum(degree > 1 for degree in layout.axes.values()) == 1 and layout.pp == 1
    assert is_one_ring or wrong([device % 2 for device in devices])


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
