"""The textbook of what is sent, counted by hand, without a run; test_ledger.py has real ledgers."""

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


def test_gradients_are_reduced_once():
    for engine in ("jax-manual", "torch-manual"):
        replicas = ("all_reduce", "dp_replicate", "gradients")
        assert bytes_sent(engine, experiment()) == {}
        assert bytes_sent(engine, experiment(dp_replicate=4)) == {replicas: 4 * N}
        assert bytes_sent(engine, experiment(dp_replicate=2, dp_shard=4, zero=1))[replicas] == N


def test_zero_sends_the_volume_of_its_paper():
    """The ZeRO paper's 2 and 3 per step, in its units: an all-reduce is a scatter and a gather."""
    for zero, volume in {1: 2, 3: 3}.items():
        one_pass = Experiment(model=MODEL, layout=Layout(dp_shard=4, zero=zero))
        assert sum(textbook("torch-manual", one_pass).values()) == volume * 4 * N


def test_engines_differ_under_accumulation():
    """Who scatters each pass, who gathers the ends once a step, a pass or a use, who gathers all again."""
    ends = C * (V + T + 2)
    layers = N - ends
    for engine, scatters, gathers, keeps in (
        ("torch-manual", N, 2 * PASSES * N, N),
        ("torch-library", N, PASSES * (ends + 2 * layers), PASSES * N),
        ("torch-compiler", PASSES * N, ends + 2 * PASSES * layers, N),
        ("jax-manual", PASSES * N, ends + 2 * PASSES * layers, ends + PASSES * layers),
    ):
        sharded = textbook(engine, experiment(dp_shard=4, zero=3))
        assert sharded["dp_shard", "reduce"] == 4 * scatters, engine
        assert sharded["dp_shard", "gather"] == 4 * gathers, engine
        kept = textbook(engine, experiment(dp_shard=4, zero=3, reshard_after_forward=False))
        assert kept["dp_shard", "gather"] == 4 * keeps, engine


def test_the_loss_in_parts_is_computed_twice():
    """Numbers of a position, of both devices of tp: three, and in parts again."""
    for chunks, numbers in ((1, 3), (4, 6)):
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


def test_recomputation_sends_again():
    """A layer's last sum is not needed again, unless dropout follows it. JAX's dots keep the sums."""
    for engine, remat, dropout, sums in (
        ("torch-manual", "none", 0.0, 0),
        ("torch-manual", "dots", 0.0, L),
        ("torch-manual", "full", 0.0, L),
        ("torch-manual", "full", 0.1, 2 * L),
        ("jax-manual", "none", 0.0, 0),
        ("jax-manual", "dots", 0.0, 0),
        ("jax-manual", "full", 0.0, L),
    ):
        back, gathers = 2 * L + 1, 0 if remat == "none" else 2 * L
        options = {"remat": remat, "dropout": dropout}
        plain, cut = (over_tp(engine, sequence_parallel=sp, **options) for sp in (False, True))
        assert plain == {"all_reduce activations": back + sums, "all_reduce gradients": back}, (engine, remat)
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


def test_context_parallelism_in_three_ways():
    """In streams of a device's own positions: whole K and V gathered; a ring's hops, and the gradients' way
    home; q, K, V and the result exchanged. Backward fetches again what it recomputes."""
    n = 4
    for context, kinds, forward, again, backward in (
        ("allgather", ("all_gather", "reduce_scatter"), 2 * n, 2 * n, 2 * n),
        ("ring", ("permute", "permute"), 4 * (n - 1), 2 * (n - 1), 2 * n),
        ("ulysses", ("all_to_all", "all_to_all"), 4, 4, 4),
    ):
        for remat, times in (("none", 0), ("full", 1)):
            for degrees, share in ({}, 1), ({"tp": 2}, 2), ({"pp": 2, "microbatches": 2}, 2):
                split = experiment(cp=n, context=context, remat=remat, **degrees)
                sent = bytes_sent("torch-manual", split)
                stream = PASSES * L * STREAM / n / share
                assert sent[kinds[0], "cp", "activations"] == (forward + times * again) * stream, context
                assert sent[kinds[1], "cp", "activation gradients"] == backward * stream, context
    grouped = edited(experiment(cp=n, context="ring"), {"model": {"n_kv_head": 1}})
    sent = bytes_sent("torch-manual", grouped)
    assert sent["permute", "cp", "activation gradients"] == PASSES * L * STREAM * 2 / 4


def test_gradients_are_summed_over_replicas():
    for layout, axis, size in (
        ({"cp": 2}, "cp", 4 * N),
        ({"cp": 2, "dp_replicate": 2}, "dp_replicate+cp", 4 * N),
        ({"cp": 2, "dp_shard": 4, "zero": 3}, "cp", N),
    ):
        assert bytes_sent("torch-manual", experiment(**layout))["all_reduce", axis, "gradients"] == size
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
