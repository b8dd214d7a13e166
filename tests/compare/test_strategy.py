"""Settings are read off what was observed: an ignored or half-obeyed setting fails the rung "strategy"."""

import pytest
from msgspec.structs import replace

from compare.contract.communication import GRADIENTS, TIED_GRADIENTS, Communication
from compare.contract.ledger import Ledger
from compare.judge.strategy import strategy_of
from compare.spec.experiment import edited, load
from tests.support.records import climbed, make_record, reduces

DDP = {"layout": {"dp_replicate": 2, "bucket_mb": 0.01}}


def objections(record) -> str:
    return "; ".join(strategy_of(record).objections.values())


def test_moments_are_missing_before_an_update(tmp_path, tiny):
    record = make_record(tmp_path / "a", edited(tiny, {"precision": {"dtype": "float16"}}))
    manifest = replace(record.manifest, resident_bytes=record.manifest.resident_bytes | {"optimizer": [0]})
    without = replace(record, manifest=manifest)
    assert "optimizer off by -100%" in objections(without)
    assert not objections(replace(without, steps=[replace(step, skipped=True) for step in without.steps]))


IGNORED = {
    "naive for bucketed": (DDP, {"gradient_sync": "naive"}, "naive (28 calls)"),
    "flat for bucketed": (DDP, {"gradient_sync": "flat"}, "flat (1 calls)"),
    "bucket_mb": (DDP, {"bucket_mb": 25.0}, "1 all-reduces within backward"),
    "zero 3 -> 2": ({"layout": {"dp_shard": 2, "zero": 3}}, {"zero": 2}, "parameters off by +100%"),
    "zero 2 -> 1": ({"layout": {"dp_shard": 2, "zero": 2}}, {"zero": 1}, "gradients off by +100%"),
    "offload": ({"layout": {"offload": "optimizer"}}, {"offload": "none"}, "optimizer off by"),
    "schedule": (
        {"layout": {"pp": 2, "microbatches": 2}},
        {"schedule": "gpipe"},
        "layout.schedule = 1f1b was asked for, and gpipe was done",
    ),
    "remat": ({"layout": {"remat": "full"}}, {"remat": "none"}, "layout.remat = full was asked for, and"),
    "sequence_parallel": (
        {"layout": {"tp": 2, "sequence_parallel": True}},
        {"sequence_parallel": False},
        "0 bytes of all_gather for activation gradients over tp, where the textbook has",
    ),
    "reshard_after_forward": (
        {"layout": {"dp_shard": 2, "zero": 3}},
        {"reshard_after_forward": False},
        "bytes of all_gather for parameters over dp_shard, where the textbook has",
    ),
}


@pytest.mark.parametrize("name", IGNORED)
def test_ignored_setting_is_named(tmp_path, tiny, name):
    """A record of another layout, which shows only in what was observed."""
    asked, done, words = IGNORED[name]
    spec = edited(tiny, {"train": {"gradient_accumulation_steps": 2}} | asked)
    right = make_record(tmp_path / "right", spec)
    assert not objections(right)
    other = make_record(tmp_path / "other", edited(spec, {"layout": done}))
    manifest = replace(right.manifest, resident_bytes=other.manifest.resident_bytes)
    wrong = replace(right, work=other.work, ledger=other.ledger, manifest=manifest)
    assert words in objections(wrong)
    assert climbed(right, wrong).failure.rung == "strategy"


def test_recomputed_products_of_one_block_are_named(tmp_path, tiny, subtests):
    for engine in ("torch-manual", "jax-compiler"):
        with subtests.test(engine):
            right = make_record(tmp_path / engine, edited(tiny, {"layout": {"remat": "dots"}}), engine=engine)
            assert not objections(right)
            wrong = replace(right, work=replace(right.work, again=right.work.again | {"products": 5}))
            assert "layout.remat = dots was asked for, and 5 of " in objections(wrong)


def test_dtype_of_tied_gradients_is_named(tmp_path, tiny):
    sections = {"precision": {"dtype": "bfloat16"}, "layout": {"pp": 2, "microbatches": 2}}
    right = make_record(tmp_path / "run", edited(tiny, sections))
    assert not objections(right)
    tied = [row for row in right.ledger.rows if row.purpose == TIED_GRADIENTS]
    assert tied
    others = [row for row in right.ledger.rows if row not in tied]
    wrong = replace(right, ledger=Ledger(rows=[*others, *(replace(row, dtype="bfloat16") for row in tied)]))
    assert "dtype of gradients that are sent" in objections(wrong)


def test_what_is_not_compared_is_in_the_verdict(tmp_path, tiny):
    gpipe = edited(tiny, {"layout": {"pp": 2, "schedule": "gpipe", "microbatches": 2}})
    record = make_record(tmp_path / "run", gpipe, engine="jax-compiler")
    verdict = climbed(record, record)
    assert verdict.passed
    assert verdict.uncompared.keys() == {"bytes sent"}


# Synchronisations, by their properties


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


def test_each_chunk_has_a_ddp_of_its_own(tmp_path):
    """Counted in PyTorch's ledger, on both ranks: four layers in four stages."""
    layout = {"pp": 2, "schedule": "interleaved", "chunks": 2, "microbatches": 2, "dp_replicate": 2}
    for bucket_mb, count in ((0.01, 9), (0.05, 5), (25.0, 2)):
        spec = edited(load("check"), {"model": {"n_layer": 4}, "layout": layout | {"bucket_mb": bucket_mb}})
        record = make_record(tmp_path / str(bucket_mb), spec, engine="torch-library", ladder=False)
        found = strategy_of(with_calls(record, [count, count])).found("layout.gradient_sync")
        assert found.startswith("ddp of"), bucket_mb


@pytest.mark.parametrize("sync", ["naive", "flat", "bucketed"])
@pytest.mark.parametrize("layout", [{}, {"dp_shard": 2, "zero": 1}], ids=["ddp", "zero 1"])
def test_jax_synchronisations_differ(tmp_path, tiny, layout, sync):
    """Each is recognised, and the number of its calls fits no other."""
    fields = layout | {"dp_replicate": 2, "bucket_mb": 0.01, "gradient_sync": sync}
    spec = edited(tiny, {"layout": fields})
    record = make_record(tmp_path / "run", spec, engine="jax-manual")
    assert strategy_of(record).found("layout.gradient_sync").startswith(sync)
    for other in {"naive", "flat", "bucketed"} - {sync}:
        calls = reduces("jax-manual", edited(spec, {"layout": {"gradient_sync": other}}), 0)
        found = strategy_of(with_calls(record, [len(calls)])).found("layout.gradient_sync")
        assert not found.startswith(sync), other


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
