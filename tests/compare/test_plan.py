"""`shardpair plan`: legal layouts, their memory and bytes, which fit, and what is refused."""

import itertools
import json
import math
import re

import msgspec
import pytest

from compare.cli import main
from compare.commands.plan import LONG, layouts, search, sent_by_stage
from compare.spec.engines.registry import ENGINES, STUDIED
from compare.spec.experiment import ExperimentError, check, edited, to_toml
from compare.theory.peak import peak_per_device

DEGREES = ("tp", "pp", "dp_shard", "dp_replicate")


def found(experiment, devices=4, *, engine="torch-manual", limit=math.inf, **given):
    """The candidates of a search, with these fields of the layout given."""
    spec = edited(experiment, {"layout": given})
    return search(engine, spec, devices, limit=limit, fixed=frozenset(given))[0]


def spec_of(candidate, experiment):
    steps = candidate.gradient_accumulation_steps
    train = {"batch_size": candidate.batch_size, "gradient_accumulation_steps": steps}
    return msgspec.structs.replace(edited(experiment, {"train": train}), layout=candidate.layout)


@pytest.mark.parametrize("engine", STUDIED)
def test_plan_finds_every_legal_layout(tiny, engine):
    """The oracle is the checks alone, for all degrees, stages, schedules and microbatches."""
    seen = {
        (*(getattr(one.layout, axis) for axis in DEGREES), one.layout.zero)
        for one in found(tiny, engine=engine)
    }
    legal = set()
    for degrees in itertools.product((1, 2, 4), repeat=4):
        for zero, microbatches, schedule in itertools.product(range(4), (1, 2, 4), ("gpipe", "1f1b")):
            layout = {**dict(zip(DEGREES, degrees, strict=True)), "microbatches": microbatches}
            try:
                spec = check(edited(tiny, {"layout": {**layout, "zero": zero, "schedule": schedule}}))
                ENGINES[engine].require_experiment(spec)
            except ExperimentError:
                continue
            if spec.layout.devices == 4:
                legal.add((*degrees, zero))
    assert seen == legal


@pytest.mark.parametrize("engine", STUDIED)
def test_plan_memory_and_bytes(tiny, engine):
    for one in found(tiny, engine=engine):
        spec = check(spec_of(one, tiny))
        assert one.bytes == pytest.approx(max(peak_per_device(engine, spec))), one.name
        assert one.sent == max(sent_by_stage(engine, spec, stage) for stage in range(spec.layout.pp)), (
            one.name
        )


def test_plan_bytes_of_ddp(tiny):
    """An all-reduce over n devices sends 2 (n - 1) / n of the gradients."""
    (one,) = found(tiny, dp_replicate=4, dp_shard=1, tp=1, pp=1)
    assert one.sent == pytest.approx(2 * 3 / 4 * one.memory["gradients"], rel=1e-6)


def test_plan_keeps_what_fits(tiny):
    every = found(tiny)
    limit = 1.000001 * sorted(one.bytes for one in every)[len(every) // 2]
    names = {one.name for one in found(tiny, limit=limit) if one.bytes <= limit}
    assert names >= {one.name for one in every if one.bytes <= limit}
    tight = found(tiny, limit=1.0)
    assert len(tight) == len(every)
    assert all(
        small.bytes <= one.bytes
        for small, one in zip(
            sorted(tight, key=lambda one: one.bytes), sorted(every, key=lambda one: one.bytes), strict=True
        )
    )


@pytest.mark.parametrize(
    "given",
    [
        {"tp": 2, "remat": "full"},
        {"microbatches": 4},
        {"schedule": "interleaved", "chunks": 3, "pp": 2},
        {"chunks": 1},
    ],
    ids=str,
)
def test_plan_keeps_given_fields(tiny, given):
    deep = edited(tiny, {"model": {"n_layer": 12}, "train": {"batch_size": 24}})
    stayed = {tuple(getattr(one.layout, field) for field in given) for one in found(deep, **given)}
    assert stayed == {tuple(given.values())}


def test_plan_step_stays_the_same(tiny):
    for sequences, devices in ((7, 7), (12, 8), (3, 4), (10, 4)):
        asked = edited(tiny, {"train": {"batch_size": sequences, "gradient_accumulation_steps": 1}})
        candidates, refused = search("torch-manual", asked, devices, limit=math.inf, fixed=frozenset())
        assert {one.batch_size * one.gradient_accumulation_steps for one in candidates} == {sequences}
        assert all(sequences % one.layout.data_parallel == 0 for one in candidates)
        assert any(f"{sequences} sequences" in why for why in refused.values()) == bool(sequences % devices)


def test_plan_splits_long_sequences(tiny):
    ways = {(one.layout.context, one.layout.zigzag) for one in found(tiny, cp=2)}
    assert ways == {("allgather", True), ("ring", True), ("ulysses", False)}
    assert {one.layout.cp for one in found(tiny)} == {1}
    long = edited(tiny, {"model": {"block_size": LONG}})
    assert {one.cp for one in layouts("torch-manual", long, 4, fixed=frozenset())} == {1, 2, 4}


@pytest.fixture
def small(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(to_toml(edited(tiny, {"train": {"batch_size": 32}})))


@pytest.mark.usefixtures("small")
def test_plan_prints(capsys):
    assert main(["plan", "small.toml", "--devices", "4"]) == 0
    printed = capsys.readouterr().out
    assert "Layouts that fit, least bytes first" in printed
    assert main(["plan", "small.toml", "--devices", "4", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["values"]["layouts"]
    assert [row["sent"] for row in rows] == sorted(row["sent"] for row in rows)
    assert rows[0]["name"] in printed
    assert main(["plan", "small.toml", "--devices", "4", "--memory_gb", "1e-6"]) == 1
    assert "layouts fits" in capsys.readouterr().out


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layout.tp", "3"), "the given layout.tp must divide them"),
        (("--layout.tp", "4"), "layout.tp = 4 does not divide model.n_head = 2"),
        (("--memory_gb", "0"), "--memory_gb 0: give more than 0"),
    ],
)
def test_plan_refuses(capsys, arguments, message):
    assert main(["plan", "small.toml", "--devices", "4", *arguments]) == 2
    streams = capsys.readouterr()
    assert message in " ".join(streams.err.split())
    assert streams.out == ""


def test_plan_names_the_command_of_the_exact_memory(capsys):
    assert main(["plan", "demo", "--devices", "8", "--layout.dp_shard", "8", "--layout.zero", "3"]) == 0
    (command,) = re.findall("exact memory.*: shardpair (ledger .*)", capsys.readouterr().out)
    assert main([*command.split(), "--dry_run"]) == 0
    assert "jax-manual on h100x8" in capsys.readouterr().out.splitlines()
    assert "--layout.dp_shard 8" in command
