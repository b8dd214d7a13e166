"""The closed forms of what is sent, without running anything: counted by hand, and what they refuse.

Against real ledgers they are held by tests/jaxpar/test_jaxpar_layouts.py, test_jaxpar_pipeline_gpt.py and
test_jaxpar_ledger.py, and by tests/torchpar/test_torchpar_zero.py and test_torchpar_tensor_parallel_gpt.py.
"""

import pytest

from compare.contract.experiment import Experiment, Layout, Model, Train
from compare.contract.parameters import parameter_count
from compare.judge.closed_forms.communication import (
    data_parallel,
    fully_sharded,
    pipeline_parallel,
    tensor_parallel,
)

L, C, T, V = 4, 8, 16, 32
MODEL = Model(n_layer=L, n_head=4, n_embd=C, block_size=T, vocab_size=V, bias=True)
N = parameter_count(MODEL)
PASSES, ROWS = 3, 8
STREAM = 4 * ROWS * T * C
MANUAL = ("jax-manual", "torch-manual")


def experiment(**layout) -> Experiment:
    train = Train(batch_size=ROWS, gradient_accumulation_steps=PASSES)
    return Experiment(model=MODEL, train=train, layout=Layout(**layout))


@pytest.mark.parametrize("engine", MANUAL)
@pytest.mark.parametrize("form", [data_parallel, fully_sharded, tensor_parallel, pipeline_parallel])
def test_one_device_sends_nothing(engine, form):
    assert form(engine, experiment()) == {}


@pytest.mark.parametrize("engine", MANUAL)
def test_gradients_are_reduced_once_whatever_the_accumulation(engine):
    replicas = ("all_reduce", "dp_replicate", "gradients")
    assert data_parallel(engine, experiment(dp_replicate=4)) == {replicas: 4 * N}
    assert data_parallel(engine, experiment(dp_replicate=2, dp_shard=4, zero=1)) == {replicas: N}


def test_zero_1_sends_as_much_as_data_parallelism_and_zero_3_half_as_much_again():
    """The ZeRO paper's 2 and 3 per step, in its units: an all-reduce is a scatter and a gather."""
    for zero, volume in {1: 2, 3: 3}.items():
        one_pass = Experiment(model=MODEL, layout=Layout(dp_shard=4, zero=zero))
        assert sum(fully_sharded("torch-manual", one_pass).values()) == volume * 4 * N


def test_what_the_engines_do_differently_under_accumulation():
    scatter = ("reduce_scatter", "dp_shard", "gradients")
    two = experiment(dp_shard=4, zero=2)
    assert fully_sharded("torch-manual", two)[scatter] == 4 * N
    assert fully_sharded("jax-manual", two)[scatter] == PASSES * 4 * N
    gather = ("all_gather", "dp_shard", "parameters")
    kept = experiment(dp_shard=4, zero=3, reshard_after_forward=False)
    ends = C * (V + T + 2)
    assert fully_sharded("torch-manual", kept)[gather] == 4 * N
    assert fully_sharded("jax-manual", kept)[gather] == 4 * (ends + PASSES * (N - ends))


def test_sequence_parallelism_cuts_each_all_reduce_in_two():
    plain = tensor_parallel("torch-manual", experiment(tp=2))
    cut = tensor_parallel("torch-manual", experiment(tp=2, sequence_parallel=True))
    for way in ("activations", "activation gradients"):
        assert plain["all_reduce", "tp", way] == PASSES * (2 * L + 1) * STREAM
        assert (
            cut["reduce_scatter", "tp", way] == cut["all_gather", "tp", way] == plain["all_reduce", "tp", way]
        )
    repeated = C * (6 * L + 2 + T)  # two norms and two row biases a layer, a norm, positions
    assert cut["all_reduce", "tp", "replicated gradients"] == 4 * repeated


def test_a_pipeline_sends_every_microbatch_both_ways_and_its_ends_what_they_share():
    pipeline = experiment(pp=2, microbatches=2)
    token, all_ends = 4 * V * C, 4 * C * (V + T + 2)
    messages = dict.fromkeys((("permute", "pp", "activations"), ("permute", "pp", "activation gradients")))
    for engine, shared in {
        "torch-manual": {("permute", "pp", "tied gradients"): token},
        "jax-manual": {("all_reduce", "pp", "tied gradients"): all_ends},
    }.items():
        expected = dict.fromkeys(messages, PASSES * STREAM) | shared
        assert pipeline_parallel(engine, pipeline) == expected


@pytest.mark.parametrize(
    ("form", "layout"), [(fully_sharded, {"dp_shard": 2, "zero": 3}), (tensor_parallel, {"tp": 2})]
)
def test_what_a_pipeline_s_stages_send_besides_is_refused(form, layout):
    with pytest.raises(ValueError, match=r"layout\.pp = 2"):
        form("jax-manual", experiment(pp=2, **layout))
