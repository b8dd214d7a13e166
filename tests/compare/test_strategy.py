"""Settings are read off observed work. test_faults.py has engines that ignore a setting."""

from typing import get_args

import pytest
from msgspec.structs import replace

from compare.contract.communication import GRADIENTS, TIED_GRADIENTS, Communication
from compare.contract.ledger import Ledger
from compare.contract.work import Kept
from compare.judge.strategy import strategy_of
from compare.spec.experiment import Experiment, Layout, Model, Precision, edited, load
from compare.spec.xla import xla_options
from tests.support.records import climbed, make_record, reduces

DDP = {"layout": {"dp_replicate": 2, "bucket_mb": 0.01}}


def objections(record) -> str:
    return "; ".join(strategy_of(record).objections.values())


def test_moments_may_be_missing_before_an_update(tmp_path, tiny):
    record = make_record(tmp_path / "a", edited(tiny, {"precision": {"dtype": "float16"}}))
    manifest = replace(record.manifest, resident_bytes=record.manifest.resident_bytes | {"optimizer": [0]})
    without = replace(record, manifest=manifest)
    assert "optimizer off by -100%" in objections(without)
    assert not objections(replace(without, steps=[replace(step, skipped=True) for step in without.steps]))


def test_options_of_xla_are_read(tmp_path, tiny):
    """A step that was compiled with fewer options than tuned is plain."""
    spec = edited(tiny, {"layout": {"xla": "tuned"}})
    record = make_record(tmp_path / "run", spec, engine="jax-manual")
    options = xla_options(spec.layout)
    assert objections(record).startswith("layout.xla = tuned was asked for; found: plain")
    for given, passes in ((options, True), (dict([*options.items()][1:]), False)):
        manifest = replace(record.manifest, compiler_options={"other": 1} | given)
        assert (not objections(replace(record, manifest=manifest))) == passes


def test_dtype_of_tied_gradients_is_named(tmp_path, tiny):
    sections = {"precision": {"dtype": "bfloat16"}, "layout": {"pp": 2, "microbatches": 2}}
    right = make_record(tmp_path / "run", edited(tiny, sections))
    tied = [row for row in right.ledger.rows if row.purpose == TIED_GRADIENTS]
    assert tied
    others = [row for row in right.ledger.rows if row not in tied]
    wrong = replace(right, ledger=Ledger(rows=[*others, *(replace(row, dtype="bfloat16") for row in tied)]))
    assert "dtype of gradients that are sent" in objections(wrong)


def test_verdict_lists_what_was_not_compared(tmp_path, tiny):
    gpipe = edited(tiny, {"layout": {"pp": 2, "schedule": "gpipe", "microbatches": 2}})
    record = make_record(tmp_path / "run", gpipe, engine="jax-compiler")
    verdict = climbed(record, record)
    assert verdict.passed
    assert verdict.uncompared.keys() == {"bytes sent"}


def test_other_strategy_with_equal_numbers(tmp_path, tiny):
    right = make_record(tmp_path / "run", edited(tiny, DDP), engine="torch-library")
    wrong = with_calls(right, [40])
    sentence = climbed(right, wrong).sentence()
    assert sentence.startswith("all numbers agree (13 rungs); FAIL at strategy: layout.gradient_sync = ")
    assert " was asked for; found: all-reduces: 40; bytes sent: 0 bytes of " in sentence
    assert sentence.endswith("(--numbers_only skips it)")
    verdict = climbed(right, wrong, skip={"strategy": "--numbers_only"})
    assert verdict.passed
    assert verdict.uncompared == {"the strategy": "--numbers_only"}


def with_calls(record, calls: list[int]):
    """The record with numbers of all-reduces over replicas, by stage."""
    row = Communication(kind="all_reduce", axis="dp_replicate", calls=1, bytes=1, wire_bytes=1)
    rows = [replace(row, purpose=GRADIENTS, calls=count, stage=s) for s, count in enumerate(calls)]
    return replace(record, ledger=Ledger(rows=rows))


@pytest.mark.parametrize(("bucket_mb", "count"), [(0.001, 10), (0.005, 7), (0.01, 4), (0.02, 3), (0.1, 1)])
def test_buckets_of_ddp_are_recognised(tmp_path, tiny, bucket_mb, count):
    """Counted in PyTorch's ledger: two layers, 16 wide, float64."""
    spec = edited(tiny, {"layout": {"dp_replicate": 2, "bucket_mb": bucket_mb}})
    record = make_record(tmp_path / "run", spec, engine="torch-library")
    assert strategy_of(with_calls(record, [count])).found("layout.gradient_sync").startswith("ddp of")
    for wrong in (4 * count + 20, 0 if count == 1 else count // 4):
        assert not strategy_of(with_calls(record, [wrong])).found("layout.gradient_sync").startswith("ddp of")


def first_observed(record):
    """The record of a short run: its first step was observed."""
    first, *others = record.steps
    return replace(record, steps=[replace(first, instrumented=True), *others])


def test_first_buckets_of_ddp_are_not_compared(tmp_path, tiny):
    """In the first step a bucket has up to 1 MB, also if bucket_mb is smaller."""
    record = make_record(tmp_path / "a", edited(tiny, DDP), engine="torch-library")
    strategy = strategy_of(with_calls(first_observed(record), [1]))
    assert "layout.gradient_sync" not in strategy.objections
    assert "after the first step" in strategy.uncompared["layout.gradient_sync"]


def test_first_step_of_pytorchs_pipeline_infers_shapes(tmp_path, tiny):
    record = make_record(
        tmp_path / "a", edited(tiny, {"layout": {"pp": 2, "microbatches": 2}}), engine="torch-library"
    )
    stream = Communication(kind="permute", axis="pp", calls=9, bytes=9, wire_bytes=9, dtype="float64, int64")
    forward = {part: 2 * count for part, count in record.work.forward.items()}
    more = replace(
        record,
        work=replace(record.work, forward=forward | {"logits": record.work.forward["logits"]}),
        ledger=Ledger(rows=[*record.ledger.rows, stream]),
    )
    assert {"dtype of streams that are sent", "blocks that forward runs"} <= strategy_of(
        more
    ).objections.keys()
    strategy = strategy_of(first_observed(more))
    assert not strategy.objections
    assert "infers shapes" in strategy.uncompared["layout.remat"]


def test_each_chunk_has_a_ddp_of_its_own(tmp_path):
    """Counted in PyTorch's ledger, on both ranks: four layers in four stages."""
    layout = {"pp": 2, "schedule": "interleaved", "chunks": 2, "microbatches": 2, "dp_replicate": 2}
    for bucket_mb, count in ((0.01, 9), (0.05, 5), (25.0, 2)):
        spec = edited(load("check"), {"model": {"n_layer": 4}, "layout": layout | {"bucket_mb": bucket_mb}})
        record = make_record(tmp_path / str(bucket_mb), spec, engine="torch-library", ladder=False)
        found = strategy_of(with_calls(record, [count, count])).found("layout.gradient_sync")
        assert found.startswith("ddp of"), bucket_mb


RINGS = {
    "right": ("torch-manual", lambda orders: orders, ""),
    "everything first": ("torch-manual", lambda orders: [*orders, "hwhwp"], "in the order hwhwp"),
    "no backward": ("torch-manual", lambda orders: orders[1:], "no ring in each forward and backward"),
    "right in one program": ("jax-manual", lambda orders: ["hpw", "hpwhpw"], ""),
    "waits first": ("jax-manual", lambda orders: ["hpw", "hw"], "in the order hw (h hop"),
    "no ring": ("jax-manual", lambda orders: [], "no ring"),
}


@pytest.mark.parametrize("name", RINGS)
def test_order_of_a_ring(tmp_path, tiny, name):
    engine, change, words = RINGS[name]
    spec = edited(tiny, {"layout": {"cp": 2, "context": "ring"}})
    record = make_record(tmp_path / "run", spec, engine=engine)
    wrong = replace(record, work=replace(record.work, rings=change(record.work.rings)))
    assert words in objections(wrong)
    assert bool(words) == bool(objections(wrong))


KEPT = {
    "rotation": ({"model": {"position": "rope"}}, ["bfloat16", "float32"], "dtype of the rotation"),
    "no rotation": ({"model": {"position": "rope"}}, [], "dtype of the rotation"),
    "router": ({"model": {"n_experts": 4}}, ["bfloat16", "float32"], "dtype of the router"),
    "ring": ({"layout": {"cp": 2, "context": "ring"}}, ["bfloat16"], "dtype of the ring"),
    "ring of wide sums": ({"layout": {"cp": 2, "context": "ring"}}, ["bfloat16", "float32"], ""),
    "softmax": ({}, [], ""),
}


@pytest.mark.parametrize("name", KEPT)
def test_dtypes_that_are_kept_in_16_bits(tmp_path, tiny, name):
    sections, dtypes, words = KEPT[name]
    what = next(part for part in get_args(Kept) if part in name)
    record = make_record(
        tmp_path / "run", edited(edited(tiny, {"precision": {"dtype": "bfloat16"}}), sections)
    )
    assert not objections(record)
    found = objections(replace(record, work=replace(record.work, kept=record.work.kept | {what: dtypes})))
    assert words in found
    assert bool(words) == bool(found)


CALLS = {"naive": 16, "flat": 1, "bucketed": 5}
"""All-reduces of jax-manual in XLA's program, counted in test_jaxpar_data_parallel.py."""


@pytest.mark.parametrize("sync", CALLS)
def test_jax_synchronisations_differ(tmp_path, sync):
    model = Model(n_layer=4, n_head=2, n_embd=16, block_size=10, vocab_size=257, bias=True)
    layout = Layout(dp_replicate=2, gradient_sync=sync, bucket_mb=0.05)
    spec = Experiment(model=model, precision=Precision(dtype="float64"), layout=layout)
    record = make_record(tmp_path / "run", spec, engine="jax-manual", ladder=False)
    for other, calls in CALLS.items():
        found = strategy_of(with_calls(record, [calls])).found("layout.gradient_sync")
        assert found.startswith(sync) == (other == sync), other


BUCKETS = {
    "as planned": (lambda sizes: sizes, True, True),
    "after backward": (lambda sizes: sizes, False, False),
    "not full": (lambda sizes: [sizes[0] / 2, sizes[0] / 2, *sizes[1:]], True, False),
    "too large": (lambda sizes: [sizes[0] + sizes[1], *sizes[2:]], True, False),
    "other gradients": (lambda sizes: [sizes[0] - 128, sizes[1] + 128, *sizes[2:]], True, False),
}


@pytest.mark.parametrize("name", BUCKETS)
def test_bucket_has_its_properties(tmp_path, tiny, name):
    change, early, fits = BUCKETS[name]
    spec = edited(tiny, DDP)
    record, sizes = make_record(tmp_path / "run", spec), change(reduces("torch-manual", spec, 0))
    work = replace(record.work, gradient_messages=[[(size, early) for size in sizes]])
    found = strategy_of(replace(with_calls(record, [len(sizes)]), work=work)).found("layout.gradient_sync")
    assert found.startswith("bucketed of") is fits
