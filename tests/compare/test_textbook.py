"""Messages against the textbook: written calls to the byte, a compiler's within a band, without a run."""

import pytest
from msgspec.structs import replace

from compare.contract.communication import Communication
from compare.contract.ledger import Ledger
from compare.judge.strategy import SENT, strategy_of
from compare.setup.presets import spread
from compare.spec.engines.registry import ENGINES, STUDIED
from compare.spec.experiment import Experiment, Layout, Model, Train, edited
from tests.support.records import make_ledger, make_record

EXPERIMENT = Experiment(
    model=Model(n_layer=4, n_head=4, n_embd=32, block_size=16, vocab_size=64, bias=True),
    train=Train(batch_size=16, gradient_accumulation_steps=2),
    layout=Layout(remat="none"),
)
FSDP, DDP = spread(EXPERIMENT, "fsdp", 4), spread(EXPERIMENT, "ddp", 2)
COMPILERS = ("jax-compiler", "jax-explicit", "torch-compiler")


@pytest.fixture
def objections(tmp_path):
    """Objections to rows of a ledger; "not compared" without a closed form."""

    def of(engine: str, experiment: Experiment, rows: list[Communication]) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        record = make_record(folder, experiment, engine=engine, ladder=False, tensors={})
        strategy = strategy_of(replace(record, ledger=Ledger(rows=rows)))
        return "not compared" if SENT in strategy.uncompared else strategy.objections.get(SENT, "")

    return of


def scaled(rows: list[Communication], by: float, **of: str) -> list[Communication]:
    """Rows whose fields are `of`, with other bytes."""
    return [
        replace(row, bytes=int(row.bytes * by)) if all(getattr(row, x) == of[x] for x in of) else row
        for row in rows
    ]


@pytest.mark.parametrize("preset", ["ddp", "fsdp", "tp_sp", "cp", "pp"])
def test_written_calls_are_exact(objections, preset):
    """Two bytes more are found. test_ledger_numbers.py has the ledgers of real runs, which are right."""
    spec = spread(EXPERIMENT, preset, 2)
    rows = make_ledger("torch-manual", spec)
    most = max(rows, key=lambda row: row.bytes)
    more = [replace(row, bytes=row.bytes + 2) if row is most else row for row in rows]
    assert f"for {most.purpose} over {most.axis}" in objections("torch-manual", spec, more)


@pytest.mark.parametrize(
    ("preset", "ignored"),
    [
        ("fsdp", {"reshard_after_forward": False}),
        ("fsdp", {"zero": 2}),
        ("tp_sp", {"sequence_parallel": False}),
        ("fsdp_tp_sp", {"reshard_after_forward": False}),
        ("fsdp_tp_sp", {"sequence_parallel": False}),
    ],
)
@pytest.mark.parametrize("engine", [*COMPILERS, "jax-manual", "torch-library"])
def test_ignored_setting_is_outside_the_band(objections, engine, preset, ignored):
    spec = spread(EXPERIMENT, preset, 4 if preset == "fsdp_tp_sp" else 2)
    rows = make_ledger(engine, edited(spec, {"layout": ignored}))
    if engine in COMPILERS:  # other pieces than the textbook's
        rows = [replace(row, kind=row.kind.replace("reduce_scatter", "all_reduce")) for row in rows]
        rows = scaled(rows, 1.1)
    assert "where the textbook has" in objections(engine, spec, rows)


@pytest.mark.parametrize("engine", [*COMPILERS, "jax-manual", "torch-library"])
def test_gradients_are_reduced_once(objections, engine):
    twice = scaled(make_ledger(engine, DDP), 2.0, axis="dp_replicate", purpose="gradients")
    assert "bytes of reduce over dp_replicate, where the textbook has" in objections(engine, DDP, twice)


@pytest.mark.parametrize("engine", ["jax-compiler", "jax-explicit"])
def test_xla_reduces_the_head_in_each_chunk(objections, engine):
    spec = edited(FSDP, {"model": {"vocab_size": 4096}, "train": {"loss_chunks": 8}})
    rows = scaled(make_ledger(engine, spec), 4.0, purpose="gradients")
    assert bool(objections(engine, spec, rows)) == (engine == "jax-explicit")
    more = scaled(rows, 4.0, purpose="gradients")
    assert objections(engine, spec, more)


def test_ddp_reduces_over_replicas_and_shards(objections):
    """Measured under ZeRO-1: one sum of all gradients over both axes, and the parameters over shards."""
    hybrid = edited(EXPERIMENT, {"layout": {"dp_replicate": 2, "dp_shard": 2, "zero": 1}})
    rows = make_ledger("torch-library", hybrid)
    assert not objections("torch-library", hybrid, rows)
    more = scaled(rows, 1.5, purpose="gradients")
    assert "reduce over dp_replicate+dp_shard" in objections("torch-library", hybrid, more)


def test_xla_may_join_axes(objections):
    """Measured: ZeRO-1 over replicas, shards and cp, over cp in each pass and over the other two at once."""
    three = edited(EXPERIMENT, {"layout": {"dp_replicate": 2, "dp_shard": 2, "zero": 1, "cp": 2}})
    rows = make_ledger("jax-compiler", three)
    others = [row for row in rows if row.purpose != "gradients"]
    (shards,) = (row for row in rows if row.purpose == "gradients" and row.axis == "dp_shard")
    joined = replace(shards, kind="all_reduce", axis="dp_replicate+dp_shard")
    assert not objections("jax-compiler", three, [*others, joined, replace(joined, axis="cp")])
    assert objections("jax-compiler", three, others)
    hsdp = spread(EXPERIMENT, "hsdp", 4)
    rows = [row for row in make_ledger("jax-compiler", hsdp) if row.axis != "dp_replicate"]
    joined = [replace(r, axis="dp_replicate+dp_shard") if r.kind == "reduce_scatter" else r for r in rows]
    assert not objections("jax-compiler", hsdp, joined)
    assert objections("jax-compiler", hsdp, [row for row in joined if "+" not in row.axis])


def test_scalars_do_not_count_and_surprises_do(objections):
    rows = make_ledger("torch-manual", FSDP)
    metric = Communication(
        kind="all_reduce", axis="dp_shard", purpose="loss", calls=2, bytes=16, wire_bytes=16
    )
    surprise = Communication(kind="all_to_all", axis="dp_shard", calls=2, bytes=999, wire_bytes=9)
    assert not objections("torch-manual", FSDP, [*rows, metric])
    words = objections("torch-manual", FSDP, [*rows, surprise])
    assert "999 bytes of all_to_all for no purpose over dp_shard, where the textbook has 0" in words


@pytest.mark.parametrize(
    ("engine", "share", "fits"),
    [("jax-explicit", 0.1, True), ("jax-explicit", 0.4, False), ("torch-library", 0.1, False)],
)
def test_compiler_may_do_a_little_in_other_ways(objections, engine, share, fits):
    tp = spread(EXPERIMENT, "tp", 2)
    rows = make_ledger(engine, tp)
    size = int(share * sum(row.bytes for row in rows))
    heads = Communication(kind="all_gather", axis="tp", calls=1, bytes=size, wire_bytes=1)
    assert bool(objections(engine, tp, [*rows, replace(heads, purpose="activations")])) is not fits


@pytest.mark.parametrize("engine", ["torch-manual", "torch-library"])
def test_padding_is_a_row_and_no_more(objections, engine):
    """Two ranks have 38 rows for a vocabulary of 37."""
    odd = edited(spread(EXPERIMENT, "fsdp", 2), {"model": {"vocab_size": 37}})
    rows, cuts_rows = make_ledger(engine, odd), ENGINES[engine].cuts == "rows"
    for more, fits in ((1.0, True), (1.01, cuts_rows), (1.2, False)):
        assert bool(objections(engine, odd, scaled(rows, more))) is not fits, more


@pytest.mark.parametrize("engine", STUDIED)
def test_written_collective_has_its_kind(objections, engine):
    """A slice of an all-reduce has the bytes of a reduce-scatter, and twice as many on the wire."""
    rows = [
        replace(row, kind="all_reduce") if row.kind == "reduce_scatter" else row
        for row in make_ledger(engine, FSDP)
    ]
    assert bool(objections(engine, FSDP, rows)) is engine.endswith("manual")


PIPELINE = edited(EXPERIMENT, {"layout": {"pp": 2, "schedule": "gpipe", "microbatches": 2}})


@pytest.mark.parametrize(
    ("engine", "spec"),
    [
        ("jax-compiler", PIPELINE),
        ("torch-library", PIPELINE),
        ("jax-explicit", edited(DDP, {"precision": {"dtype": "bfloat16"}})),
        ("jax-manual", edited(FSDP, {"model": {"n_layer": 1}})),
        ("torch-manual", edited(PIPELINE, {"layout": {"dp_shard": 2, "zero": 3}})),
    ],
)
def test_no_closed_form_is_not_compared(objections, engine, spec):
    assert objections(engine, spec, []) == "not compared"


@pytest.mark.parametrize(
    ("engine", "preset", "what"),
    [
        *((engine, "ep", "exchange over ep") for engine in COMPILERS),
        ("jax-compiler", "cp", "the upper limit of reduce over cp"),
    ],
)
def test_flows_without_limit_are_listed(tmp_path, engine, preset, what):
    """Ten times the bytes pass, so the verdict lists them as not compared."""
    experts = {"model": {"n_experts": 4, "bias": False}} if preset == "ep" else {}
    spec = spread(edited(EXPERIMENT, experts), preset, 2)
    record = make_record(tmp_path / "r", spec, engine=engine, ladder=False, tensors={})
    assert strategy_of(record).uncompared[what].startswith("a compiler may")
