"""What a run did is read off what was observed, and held to what was asked; what is saved, to the end."""

import pytest
from msgspec.structs import replace

from compare.checkpoint.description import CHECKPOINTS
from compare.contract.ledger import Ledger
from compare.contract.request import Rung
from compare.judge.acceptance import objections
from compare.judge.ladder import REQUEST, climb
from compare.judge.strategy import strategy_of
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import Layout, edited, load
from compare.theory.gradient_messages import gradient_messages
from tests.support.checkpoints import random_state
from tests.support.records import make_ledger, make_record, tensors_of
from tests.support.small_checkpoint import EXPERIMENT, save

DDP = {"layout": {"dp_replicate": 2, "bucket_mb": 0.01}}
ENGINES = list(STUDIED)


def layouts(engine):
    """Layouts that the engine can express, of every kind."""
    found = {
        "ddp": DDP,
        "fsdp": {"layout": {"dp_shard": 2, "zero": 3}},
        "tp_sp": {"layout": {"tp": 2, "sequence_parallel": True}},
    }
    for schedule in STUDIED[engine].layouts.schedules[:1]:
        found["pp"] = {"layout": {"pp": 2, "schedule": schedule, "microbatches": 2}}
    return found.items()


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_done_as_asked_is_told_and_nothing_is_objected(tmp_path, tiny, engine):
    for name, layout in layouts(engine):
        strategy = strategy_of(make_record(tmp_path / name, edited(tiny, layout), engine=engine))
        assert strategy.objections == [], name
        assert strategy.found("layout.remat") == STUDIED[engine].remat_for(tiny.layout)
        assert strategy.found("what is sent")


def test_moments_are_not_asked_for_before_an_update(tmp_path, tiny):
    record = make_record(tmp_path / "a", edited(tiny, {"precision": {"dtype": "float16"}}))
    manifest = replace(record.manifest, resident_bytes=record.manifest.resident_bytes | {"optimizer": [0]})
    without = replace(record, manifest=manifest)
    assert "optimizer off by -100%" in " ".join(strategy_of(without).objections)
    skipped = replace(without, steps=[replace(step, skipped=True) for step in record.steps])
    assert not strategy_of(skipped).objections


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
        "0 bytes of gather over tp, where the textbook has",
    ),
    "reshard_after_forward": (
        {"layout": {"dp_shard": 2, "zero": 3}},
        {"reshard_after_forward": False},
        "bytes of gather over dp_shard, where the textbook has",
    ),
}


@pytest.mark.parametrize("name", IGNORED)
def test_a_setting_that_is_ignored_is_named(tmp_path, tiny, name):
    """The record of a run that did something else, and says nothing of it but in what was observed."""
    asked, done, says = IGNORED[name]
    spec = edited(tiny, {"train": {"gradient_accumulation_steps": 2}} | asked)
    right = make_record(tmp_path / "right", spec)
    other = make_record(tmp_path / "other", edited(spec, {"layout": done}))
    manifest = replace(right.manifest, resident_bytes=other.manifest.resident_bytes)
    wrong = replace(right, work=other.work, ledger=other.ledger, manifest=manifest)
    assert says in "; ".join(strategy_of(wrong).objections)
    assert climb(right, wrong).failure.rung == "strategy"


def again(change):
    """What backward runs again, changed."""
    return lambda record: replace(record, work=replace(record.work, again=change(record.work.again)))


def every_pass(record):
    """Gradients over replicas, twice a step."""
    rows = [
        replace(row, bytes=2 * row.bytes) if (row.axis, row.purpose) == ("dp_replicate", "gradients") else row
        for row in record.ledger.rows
    ]
    return replace(record, ledger=Ledger(rows=rows))


HALF_OBEYED = {
    "products of one block again": (
        ("torch-manual", "jax-compiler"),
        {"layout": {"remat": "dots"}},
        again(lambda counts: counts | {"products": 5}),
        "layout.remat = dots was asked for, and 5 of ",
    ),
    "gradients in every pass": (
        ("torch-library", "torch-compiler", "jax-compiler", "jax-explicit", "jax-manual"),
        DDP,
        every_pass,
        "bytes of reduce over dp_replicate, where the textbook has",
    ),
}


@pytest.mark.parametrize("name", HALF_OBEYED)
def test_a_setting_that_is_half_obeyed_is_named(tmp_path, tiny, name):
    """Records that no planted fault leaves."""
    engines, asked, damage, says = HALF_OBEYED[name]
    for engine in engines:
        right = make_record(tmp_path / engine, edited(tiny, {"model": {"n_layer": 2}} | asked), engine=engine)
        assert strategy_of(right).objections == []
        assert says in "; ".join(strategy_of(damage(right)).objections), engine


IN_OTHER_PIECES = {"reduce_scatter": "all_reduce"}
"""XLA on a CPU makes all-reduces and slices of scatters."""


def test_a_compiler_may_send_other_pieces_but_not_those_of_another_layout(tmp_path, tiny):
    layouts = {
        "fsdp": ({"dp_shard": 2, "zero": 3}, ({"reshard_after_forward": False}, {"zero": 2})),
        "tp_sp": ({"tp": 2, "sequence_parallel": True}, ({"sequence_parallel": False},)),
        "both": (
            {"dp_shard": 2, "zero": 3, "tp": 2, "sequence_parallel": True},
            ({"reshard_after_forward": False}, {"zero": 2}, {"sequence_parallel": False}),
        ),
    }
    passes = {"train": {"gradient_accumulation_steps": 2}}
    for engine in ("jax-compiler", "jax-explicit", "torch-library", "torch-compiler"):
        for name, (layout, ignored) in layouts.items():
            spec = edited(tiny, {"layout": layout} | passes)
            record = make_record(tmp_path / engine / name, spec, engine=engine)
            for fields in ({}, *ignored):
                sent = make_ledger(engine, edited(spec, {"layout": fields}))
                if engine.startswith("jax"):  # PyTorch's wrappers are held to the byte
                    sent = [
                        replace(
                            row, kind=IN_OTHER_PIECES.get(row.kind, row.kind), bytes=row.bytes * 1001 // 1000
                        )
                        for row in sent
                    ]
                strategy = strategy_of(replace(record, ledger=Ledger(rows=sent)))
                assert bool(strategy.objections) == bool(fields), (engine, name, fields, strategy.objections)


def test_what_is_saved_is_what_the_run_ended_with(tmp_path):
    spec = edited(EXPERIMENT, {"train": {"max_iters": 3}, "checkpoint": {"every": 1}})
    saved = {name: tensor for (group, name), tensor in random_state(EXPERIMENT).items() if group == "weights"}
    for name, weights, step, says in (
        ("right", saved, 3, ""),
        ("other", {one: tensor + 1 for one, tensor in saved.items()}, 3, "it saved another"),
        ("earlier", saved, 2, "it saved no checkpoint after its last step, 3"),
    ):
        tensors = tensors_of(spec) | {Rung.FINAL_WEIGHTS: weights}
        record = make_record(tmp_path / name, spec, tensors=tensors)
        save(record.folder / CHECKPOINTS, step)
        found = [one for one in objections(record) if "saved" in one]
        assert bool(found) == bool(says)
        assert says in "".join(found)


def test_two_trainings_are_no_pair(tmp_path, tiny):
    right = make_record(tmp_path / "right", tiny)
    other = make_record(tmp_path / "other", edited(tiny, {"optimizer": {"eps": 1e-6}}))
    failure = climb(right, other).failure
    assert failure.rung == REQUEST
    assert "optimizer.eps = 1e-06 instead of 1e-08" in failure.worst
    assert climb(right, make_record(tmp_path / "spread", edited(tiny, DDP))).passed


@pytest.mark.parametrize(("pp", "counts"), [(1, (10, 7, 4, 3, 2, 1)), (2, (7, 5, 4, 3, 2, 1))])
def test_buckets_of_ddp_are_as_many_as_pytorch_made(tiny, pp, counts):
    """Counted in its ledger, on the first rank: two layers, 16 wide, float64."""
    for bucket_mb, count in zip((0.001, 0.005, 0.01, 0.02, 0.04, 0.1), counts, strict=True):
        layout = Layout(dp_replicate=2, pp=pp, microbatches=pp, bucket_mb=bucket_mb)
        messages = gradient_messages("torch-library", replace(tiny, layout=layout), gradient_sync="ddp")
        assert len(messages.by_stage[0]) == count, bucket_mb


def test_each_chunk_of_a_stage_has_a_ddp_of_its_own():
    """Counted in PyTorch's ledger, on both ranks: four layers in four stages."""
    experiment = edited(load("check"), {"model": {"n_layer": 4}})
    for bucket_mb, count in ((0.01, 9), (0.05, 5), (25.0, 2)):
        layout = Layout(
            dp_replicate=2, pp=2, schedule="interleaved", chunks=2, microbatches=2, bucket_mb=bucket_mb
        )
        messages = gradient_messages("torch-library", replace(experiment, layout=layout), gradient_sync="ddp")
        assert [*map(len, messages.by_stage)] == [count, count], bucket_mb


def test_a_norm_that_fits_beside_a_bias_shares_its_bucket(tiny):
    """The final norm is last in the module: it leaves first, with the bias of the last block."""
    wide = replace(tiny.model, n_layer=8, n_embd=40, n_head=1, block_size=12, vocab_size=64)
    layout = Layout(dp_replicate=3, bucket_mb=0.001)
    experiment = replace(tiny, model=wide, layout=layout)
    (sizes,) = gradient_messages("torch-manual", experiment, gradient_sync="bucketed").by_stage
    assert len(sizes) == 67
