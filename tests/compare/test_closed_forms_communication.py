"""The textbook of what is sent, counted by hand, without a run; test_ledger.py has real ledgers."""

import pytest
from msgspec.structs import replace

from compare.judge.textbook import routed
from compare.numerics.parameters import parameter_count
from compare.spec.experiment import Experiment, Layout, Model, Train, edited
from compare.theory.communication import bytes_sent, is_plain, textbook
from compare.theory.memory import state_of_stage

L, C, T, V = 4, 8, 16, 32
MODEL = Model(n_layer=L, n_head=4, n_embd=C, block_size=T, vocab_size=V, bias=True)
N = parameter_count(MODEL)
PASSES, ROWS = 3, 8
STREAM = 4 * ROWS * T * C


def experiment(**layout) -> Experiment:
    train = Train(batch_size=ROWS, gradient_accumulation_steps=PASSES)
    return Experiment(model=MODEL, train=train, layout=Layout(**layout))


@pytest.mark.parametrize("engine", ["jax-manual", "torch-manual"])
def test_gradients_are_reduced_once(engine):
    replicas = ("all_reduce", "dp_replicate", "gradients")
    assert bytes_sent(engine, experiment()) == {}
    assert bytes_sent(engine, experiment(dp_replicate=4)) == {replicas: 4 * N}
    assert bytes_sent(engine, experiment(dp_replicate=2, dp_shard=4, zero=1))[replicas] == N


@pytest.mark.parametrize(("zero", "volume"), [(1, 2), (3, 3)])
def test_zero_sends_the_volume_of_its_paper(zero, volume):
    """The ZeRO paper's 2 and 3 per step, in its units: an all-reduce is a scatter and a gather."""
    one_pass = Experiment(model=MODEL, layout=Layout(dp_shard=4, zero=zero))
    assert sum(textbook("torch-manual", one_pass).values()) == volume * 4 * N


@pytest.mark.parametrize(
    ("engine", "width"), [("torch-manual", 0.5), ("torch-library", 0.5), ("jax-manual", 1)]
)
def test_gathers_in_16_bits(engine, width):
    """Norms and the ends of the model stay in float32. XLA on a CPU gathers float32."""
    norms = L * 4 * C
    halves = {"dtype": "bfloat16", "gather": "products"}
    for layout in (Layout(dp_shard=4, zero=3), Layout(dp_shard=4, zero=2), Layout(dp_replicate=4)):
        stored = edited(Experiment(model=MODEL, layout=layout), {"precision": {"dtype": "bfloat16"}})
        before, after = textbook(engine, stored), textbook(engine, edited(stored, {"precision": halves}))
        less = 2 * 4 * (1 - width) * (LAYERS - norms) if layout.zero == 3 else 0
        assert before.pop(("dp_shard", "gather"), 0) - after.pop(("dp_shard", "gather"), 0) == less
        assert before == after


ENDS = C * (V + T + 2)
LAYERS = N - ENDS


@pytest.mark.parametrize(
    ("engine", "scatters", "gathers", "keeps"),
    [
        ("torch-manual", N, 2 * PASSES * N, N),
        ("torch-library", N, PASSES * (ENDS + 2 * LAYERS), PASSES * N),
        ("torch-compiler", PASSES * N, ENDS + 2 * PASSES * LAYERS, N),
        ("jax-manual", PASSES * N, ENDS + 2 * PASSES * LAYERS, ENDS + PASSES * LAYERS),
    ],
)
def test_engines_differ_under_accumulation(engine, scatters, gathers, keeps):
    """Engines scatter in each pass or once. They gather the ends once a step, a pass or a use."""
    sharded = textbook(engine, experiment(dp_shard=4, zero=3))
    assert sharded["dp_shard", "reduce"] == 4 * scatters
    assert sharded["dp_shard", "gather"] == 4 * gathers
    kept = textbook(engine, experiment(dp_shard=4, zero=3, reshard_after_forward=False))
    assert kept["dp_shard", "gather"] == 4 * keeps


@pytest.mark.parametrize(("chunks", "numbers"), [(1, 3), (4, 6)])
def test_loss_in_parts_is_computed_twice(chunks, numbers):
    """Numbers of a position, of both devices of tp: three, and in parts again."""
    train = Train(batch_size=ROWS, gradient_accumulation_steps=PASSES, loss_chunks=chunks)
    sent = bytes_sent("torch-manual", Experiment(model=MODEL, train=train, layout=Layout(tp=2)))
    assert sent["all_gather", "tp", "loss"] == 4 * 2 * numbers * PASSES * ROWS * T


def test_sequence_parallelism_splits_all_reduce():
    plain = bytes_sent("torch-manual", experiment(tp=2))
    cut = bytes_sent("torch-manual", experiment(tp=2, sequence_parallel=True))
    for way in ("activations", "activation gradients"):
        assert plain["all_reduce", "tp", way] == PASSES * (2 * L + 1) * STREAM
        assert (
            cut["reduce_scatter", "tp", way] == cut["all_gather", "tp", way] == plain["all_reduce", "tp", way]
        )
    repeated = C * (6 * L + 2 + T)  # two norms and two row biases a layer, a norm, positions
    assert cut["all_reduce", "tp", "replicated gradients"] == 4 * repeated


def over_tp(engine: str, **layout) -> dict[str, float]:
    """Streams that tp sends in a pass, by kind, in whole widths: activations, and gradients apart."""
    fields = {"precision": {"dtype": layout.pop("dtype", "float32")}}
    fields |= {"model": {"dropout": layout.pop("dropout", 0.0)}}
    whole = edited(experiment(tp=2, **layout), fields)
    sent = bytes_sent(engine, whole)
    return {
        f"{kind} {purpose.removeprefix('activation ')}": size / PASSES / STREAM
        for (kind, _, purpose), size in sent.items()
        if purpose in ("activations", "activation gradients")
    }


@pytest.mark.parametrize(
    ("engine", "remat", "dropout", "sums"),
    [
        ("torch-manual", "none", 0.0, 0),
        ("torch-manual", "dots", 0.0, L),
        ("torch-manual", "full", 0.0, L),
        ("torch-manual", "full", 0.1, 2 * L),
        ("jax-manual", "none", 0.0, 0),
        ("jax-manual", "dots", 0.0, 0),
        ("jax-manual", "full", 0.0, L),
    ],
)
def test_recomputation_sends_again(engine, remat, dropout, sums):
    """A layer's last sum is not needed again, unless dropout follows it. JAX's dots keep the sums."""
    back, gathers = 2 * L + 1, 0 if remat == "none" else 2 * L
    options = {"remat": remat, "dropout": dropout}
    plain, cut = (over_tp(engine, sequence_parallel=sp, **options) for sp in (False, True))
    assert plain == {"all_reduce activations": back + sums, "all_reduce gradients": back}
    assert cut == {
        "reduce_scatter activations": back + sums,
        "all_gather activations": back + gathers,
        "reduce_scatter gradients": back,
        "all_gather gradients": back,
    }


def test_products_in_16_bits_send_half():
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


SENT, SENT_BACK = ("permute", "pp", "activations"), ("permute", "pp", "activation gradients")


def test_pipeline_sends_both_ways():
    pipeline = experiment(pp=2, microbatches=2)
    token = 4 * V * C
    first, last = (bytes_sent("torch-manual", pipeline, stage=stage) for stage in (0, 1))
    tied = {("permute", "pp", "tied gradients"): token}
    assert first == {SENT: PASSES * STREAM} | tied
    assert last == {SENT_BACK: PASSES * STREAM} | tied


def test_middle_rank_sends_every_chunk():
    middle = bytes_sent("torch-manual", experiment(pp=4, microbatches=4), stage=2)
    assert middle == {SENT: PASSES * STREAM, SENT_BACK: PASSES * STREAM}
    chunks = experiment(pp=2, microbatches=2, schedule="interleaved", chunks=2)
    first, last = (bytes_sent("torch-manual", chunks, stage=stage) for stage in (0, 1))
    assert (first[SENT], first[SENT_BACK]) == (2 * PASSES * STREAM, PASSES * STREAM)
    assert (last[SENT], last[SENT_BACK]) == (PASSES * STREAM, 2 * PASSES * STREAM)


CP = 4
WAYS = {
    "allgather": ("all_gather", "reduce_scatter", 2 * CP, 2 * CP, 2 * CP),
    "ring": ("permute", "permute", 4 * (CP - 1), 2 * (CP - 1), 2 * CP),
    "ulysses": ("all_to_all", "all_to_all", 4, 4, 4),
}
"""Kinds forward and backward; streams of a device's own positions forward, recomputed, and backward."""


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("degrees", [{}, {"tp": 2}, {"pp": 2, "microbatches": 2}], ids=["cp", "tp", "pp"])
@pytest.mark.parametrize("context", WAYS)
def test_context_parallelism(context, degrees, remat):
    """An all-gather sends whole K and V, a ring its hops, ulysses q, K, V and the result."""
    kind, kind_back, forward, again, backward = WAYS[context]
    sent = bytes_sent("torch-manual", experiment(cp=CP, context=context, remat=remat, **degrees))
    stream = PASSES * L * STREAM / CP / (2 if degrees else 1)
    assert sent[kind, "cp", "activations"] == (forward + (remat == "full") * again) * stream
    assert sent[kind_back, "cp", "activation gradients"] == backward * stream


def test_ring_of_grouped_queries():
    grouped = edited(experiment(cp=CP, context="ring"), {"model": {"n_kv_head": 1}})
    sent = bytes_sent("torch-manual", grouped)
    assert sent["permute", "cp", "activation gradients"] == PASSES * L * STREAM * 2 / 4


@pytest.mark.parametrize(
    ("layout", "axis", "size"),
    [
        ({"cp": 2}, "cp", 4 * N),
        ({"cp": 2, "dp_replicate": 2}, "dp_replicate+cp", 4 * N),
        ({"cp": 2, "dp_shard": 4, "zero": 3}, "cp", N),
    ],
    ids=["cp", "ddp_cp", "fsdp_cp"],
)
def test_gradients_are_summed_over_replicas(layout, axis, size):
    assert bytes_sent("torch-manual", experiment(**layout))["all_reduce", axis, "gradients"] == size


def test_ddp_sums_over_shards_and_cp():
    by_ddp = bytes_sent("torch-library", experiment(cp=2, dp_shard=2, zero=1))
    assert by_ddp["all_reduce", "dp_shard+cp", "gradients"] == 4 * N
    assert {axis for _, axis, purpose in by_ddp if purpose == "gradients"} == {"dp_shard+cp"}


def test_all_of_it_is_along_every_axis():
    everything = experiment(pp=2, microbatches=2, dp_replicate=2, dp_shard=2, zero=3, tp=2)
    assert {axis for axis, _ in textbook("torch-manual", everything, stage=1)} == {
        "pp",
        "dp_replicate",
        "dp_shard",
        "tp",
    }
    assert not is_plain(everything)  # what runs next is gathered ahead
    assert is_plain(edited(everything, {"layout": {"zero": 2}}))


def test_experts_exchange_tokens():
    """A rank of ep has 2 of 4 experts, and half of ZeRO's shards of these; tokens go out and come back."""
    experts, k = 4, 2
    model = replace(MODEL, bias=False, n_experts=experts, experts_per_token=k)
    count = parameter_count(model)
    own = L * experts * 2 * C * 4 * C
    train = Train(batch_size=ROWS, gradient_accumulation_steps=PASSES)
    for zero, reduced in (
        (0, {("all_reduce", "dp_shard+ep"): count - own, ("all_reduce", "dp_shard"): own / 2}),
        (1, {("reduce_scatter", "dp_shard+ep"): count - own, ("reduce_scatter", "dp_shard"): own / 2}),
    ):
        layout = Layout(dp_shard=4, ep=2, zero=zero)
        sent = bytes_sent("torch-manual", Experiment(model=model, train=train, layout=layout))
        assert {key[:2]: size / 4 for key, size in sent.items() if key[2] == "gradients"} == reduced
        for way in ("activations", "activation gradients"):
            assert sent["all_to_all", "ep", way] == 2 * k * PASSES * L * STREAM / 4
        held = state_of_stage("torch-manual", Experiment(model=model, train=train, layout=layout), stage=0)
        assert held["parameters"] == 4 * (count - own / 2)
        assert held["optimizer"] == (8 * (count - own / 2) if not zero else 2 * count)
    by_position = []
    for sequence_parallel in (False, True):  # jax-manual gathers positions where they arrive
        layout = Layout(dp_shard=2, ep=2, tp=2, sequence_parallel=sequence_parallel)
        sent = bytes_sent("jax-manual", Experiment(model=model, train=train, layout=layout))
        by_position.append(sent["all_to_all", "ep", "activation gradients"])
    assert by_position == [2 * 2 * PASSES * L * STREAM / 2, 2 * PASSES * L * STREAM / 2]


def test_a_busy_rank_of_ep_sends_more():
    """Rows that came go back: of both layers the first rank has 4 and 2 of 4 each, where 2 are its share."""
    both = Layout(dp_shard=2, ep=2)
    assert routed(both, [[3, 1, 0, 0], [1, 1, 1, 1]]) == ((1 + 6 / 4) / 2, (1 + 6 / 4) / 2)
    assert routed(both, [[4, 0, 0, 0], [0, 0, 4, 0]]) == (1, 1.5)  # in one layer the one, then the other
    assert routed(replace(both, dp_replicate=2), [[3, 1, 0, 0]]) == (1, 1.5)
