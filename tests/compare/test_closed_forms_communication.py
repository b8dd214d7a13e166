"""The closed forms of what is sent, without running anything: counted by hand, and what they refuse.

Against real ledgers they are held by tests/jaxpar/test_jaxpar_layouts.py, test_jaxpar_pipeline_gpt.py and
test_jaxpar_ledger.py, and by tests/torchpar/test_torchpar_zero.py and test_torchpar_tensor_parallel_gpt.py.
"""

import pytest

from compare.judge.closed_forms.communication import (
    communication,
    data_parallel,
    fully_sharded,
    pipeline_parallel,
    tensor_parallel,
)
from compare.numerics.parameters import parameter_count
from compare.spec.experiment import Experiment, Layout, Model, Train, edited

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


def test_what_backward_does_not_need_is_not_gathered_again():
    """Biases of a layer: of norms 2 C, of qkv 3 C, projection C, up 4 C, down C; what is kept needs none."""
    gather = ("all_gather", "dp_shard", "parameters")
    ends, biases = C * (V + T + 2), 11 * C
    for remat, unneeded in {"none": biases, "dots": C, "full": C}.items():
        found = fully_sharded("jax-manual", experiment(dp_shard=4, zero=3, remat=remat))[gather]
        layers = N - ends
        assert found == 4 * (ends + PASSES * (2 * layers - L * unneeded)), remat


def test_the_loss_in_parts_is_computed_twice():
    """Numbers of a position over two devices of tp: three; in parts again, without the target's in JAX."""
    for engine, copies, again in (("torch-manual", 2, 6), ("jax-manual", 1, 5)):
        for chunks, numbers in ((1, 3), (4, again)):
            train = Train(batch_size=ROWS, gradient_accumulation_steps=PASSES, loss_chunks=chunks)
            one = Experiment(model=MODEL, train=train, layout=Layout(tp=2))
            sent = {key: size for key, size in tensor_parallel(engine, one).items() if key[2] == "loss"}
            assert list(sent.values()) == [4 * copies * numbers * PASSES * ROWS * T], (engine, chunks)


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


def over_tp(engine: str, **layout) -> dict[str, float]:
    """Streams that tp sends in a pass, by kind, in whole widths: activations, and gradients apart."""
    dtype = layout.pop("dtype", "float32")
    whole = edited(experiment(tp=2, **layout), {"precision": {"dtype": dtype}})
    sent = tensor_parallel(engine, whole)
    return {
        f"{kind} {purpose.removeprefix('activation ')}": size / PASSES / STREAM
        for (kind, _, purpose), size in sent.items()
        if purpose in ("activations", "activation gradients")
    }


@pytest.mark.parametrize("engine", ["torch-manual", "jax-manual"])
def test_what_is_recomputed_sums_once_more_a_layer_and_gathers_twice(engine):
    """A layer's last sum is not needed again. JAX's dots keep the sums."""
    back = 2 * L + 1
    for remat in ("none", "dots", "full"):
        sums = L if remat == "full" or (remat == "dots" and engine == "torch-manual") else 0
        gathers = 0 if remat == "none" else 2 * L
        plain, cut = (over_tp(engine, remat=remat, sequence_parallel=sp) for sp in (False, True))
        assert plain == {"all_reduce activations": 2 * L + 1 + sums, "all_reduce gradients": back}
        assert cut == {
            "reduce_scatter activations": 2 * L + 1 + sums,
            "all_gather activations": 2 * L + 1 + gathers,
            "reduce_scatter gradients": back,
            "all_gather gradients": back,
        }


def test_in_sixteen_bits_half_of_what_leaves_a_region_is_sent_and_of_its_gradient():
    """Norms are computed in float32: what enters a region is wide. The embedding's way out is, too."""
    narrow = (2 * L) / 2 + 1
    for dtype in ("bfloat16", "float16"):
        assert over_tp("torch-manual", sequence_parallel=True, remat="full", dtype=dtype) == {
            "reduce_scatter activations": narrow + L / 2,
            "all_gather activations": 4 * L + 1,
            "reduce_scatter gradients": 2 * L + 1,
            "all_gather gradients": narrow,
        }
    cut = over_tp("jax-manual", sequence_parallel=True, remat="none", dtype="bfloat16")
    assert set(cut.values()) == {2 * L + 1}  # XLA on a CPU sums no 16 bits


def test_a_pipeline_that_jax_recomputes_has_no_form():
    with pytest.raises(ValueError, match="in a pipeline"):
        tensor_parallel("jax-manual", experiment(tp=2, pp=2, microbatches=2, remat="full"))


SENT, SENT_BACK = ("permute", "pp", "activations"), ("permute", "pp", "activation gradients")


def test_a_pipeline_sends_every_microbatch_both_ways_and_its_ends_what_they_share():
    pipeline = experiment(pp=2, microbatches=2)
    token, all_ends = 4 * V * C, 4 * C * (V + T + 2)
    first, last = (pipeline_parallel("torch-manual", pipeline, stage=stage) for stage in (0, 1))
    tied = {("permute", "pp", "tied gradients"): token}
    assert first == {SENT: PASSES * STREAM, SENT_BACK: 0} | tied
    assert last == {SENT: 0, SENT_BACK: PASSES * STREAM} | tied
    # In lock-step all devices send in a tick in which one does: as often, with two ranks.
    in_lock_step = {SENT: PASSES * STREAM, SENT_BACK: PASSES * STREAM}
    for stage in (0, 1):
        expected = in_lock_step | {("all_reduce", "pp", "tied gradients"): all_ends}
        assert pipeline_parallel("jax-manual", pipeline, stage=stage) == expected


def test_a_rank_in_the_middle_sends_for_every_chunk_and_shares_nothing():
    middle = pipeline_parallel("torch-manual", experiment(pp=4, microbatches=4), stage=2)
    assert middle == {SENT: PASSES * STREAM, SENT_BACK: PASSES * STREAM}
    chunks = experiment(pp=2, microbatches=2, schedule="interleaved", chunks=2)
    first, last = (pipeline_parallel("torch-manual", chunks, stage=stage) for stage in (0, 1))
    assert (first[SENT], first[SENT_BACK]) == (2 * PASSES * STREAM, PASSES * STREAM)
    assert (last[SENT], last[SENT_BACK]) == (PASSES * STREAM, 2 * PASSES * STREAM)


def test_stages_divide_what_tensor_parallelism_sends():
    """The embedding's region is the first one's, the head's and the loss the last one's."""
    both = [
        tensor_parallel("torch-manual", experiment(pp=2, microbatches=2, tp=2), stage=stage)
        for stage in (0, 1)
    ]
    alone = tensor_parallel("torch-manual", experiment(tp=2))
    for key, size in alone.items():
        assert sum(stage.get(key, 0) for stage in both) == size
    ways = [
        both[stage]["all_reduce", "tp", way]
        for stage in (0, 1)
        for way in ("activations", "activation gradients")
    ]
    assert ways == [PASSES * count * STREAM for count in (L + 1, L, L, L + 1)]


def test_a_stage_gathers_its_own_parameters_but_for_what_it_gathered_last():
    """Two ranks of two blocks each. On the first a backward follows a later forward, whose last block is
    there; on the last one each backward follows its forward, and each forward finds the first block."""
    pipeline = experiment(pp=2, microbatches=2, dp_shard=2, zero=3)
    microbatches, token, position, norm = 2 * PASSES, 4 * V * C, 4 * T * C, 4 * 2 * C
    block = (4 * N - token - position - norm) // L
    gather, scatter = ("all_gather", "dp_shard", "parameters"), ("reduce_scatter", "dp_shard", "gradients")
    first, last = (fully_sharded("torch-manual", pipeline, stage=stage) for stage in (0, 1))
    assert (first[scatter], last[scatter]) == (token + position + 2 * block, token + norm + 2 * block)
    # All for each forward, and for each backward the first block; for the last backward the other one, too.
    assert first[gather] == microbatches * (first[scatter] + position + block) + block
    assert last[gather] == microbatches * (token + 2 * (norm + block) + block) + block


@pytest.mark.parametrize("engine", MANUAL)
def test_all_of_it_is_the_union_of_the_strategies(engine):
    everything = experiment(pp=2, microbatches=2, dp_replicate=2, dp_shard=2, zero=3, tp=2)
    found = communication(engine, everything, stage=1)
    parts = [
        form(engine, everything, stage=1)
        for form in (data_parallel, fully_sharded, tensor_parallel, pipeline_parallel)
    ]
    assert found == {key: size for part in parts for key, size in part.items() if size}
    assert {axis for _, axis, _ in found} == {"pp", "dp_replicate", "dp_shard", "tp"}
