"""`shardpair check`: engines on several devices against one unsharded device, and the cases of a check."""

import json

import msgspec
import pytest

from compare.commands.check import VARIANTS, Check, rungs_of_engines
from compare.commands.faults import fault_cases
from compare.setup.presets import PRESETS
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import Layout, load
from tests.support.records import CLIMBED

DEVICES = 4
STEPS = 3
SMALL = ("--model.n_layer", "2", "--train.max_iters", str(STEPS))


def test_engines_equal_one_device(shardpair):
    """An engine of each side, by each way to reduce gradients."""
    engines = ("torch-manual", "jax-manual")
    done = shardpair("check", "--engines", *engines, "--devices", str(DEVICES), *SMALL, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout)["values"]["outcome"]
    assert outcome["experiment"]["train"]["max_iters"] == STEPS
    expected = [f"{engine}.1" for engine in engines]
    for engine in engines:
        expected += [f"{engine}.{DEVICES}-{sync}" for sync in STUDIED[engine].gradient_sync]
    assert [verdict["candidate"] for verdict in outcome["verdicts"]] == expected
    for verdict in outcome["verdicts"]:
        errors = {result["rung"]: result["error"] for result in verdict["rungs"]}
        assert len(errors) == len(CLIMBED), verdict
        assert max(errors.values()) <= 1e-10
    for name, kept in outcome["kept"].items():
        sharded, cost = f".{DEVICES}-" in name, kept["1"]
        assert cost["devices"] == (DEVICES if sharded else 1)
        assert (cost["comm_bytes"] > 0) == sharded


def test_engines_equal_one_device_in_float32(shardpair):
    """One engine per side; a test below compares the others in bfloat16."""
    engines = ("jax-explicit", "torch-compiler")
    asked = ("check", "--presets", "ddp", "--engines", *engines, "--precision.dtype", "float32", "--json")
    done = shardpair(*asked, *SMALL, "--output", "grid.md")
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = json.loads(done.stdout)["values"]["outcome"]["verdicts"]
    assert [verdict["candidate"] for verdict in verdicts] == [f"{engine}.ddp" for engine in engines]
    for verdict in verdicts:
        (gradients,) = (result["error"] for result in verdict["rungs"] if result["rung"] == "gradients")
        assert 1e-10 < gradients <= 1e-5
    page = (shardpair.folder / "grid.md").read_text()
    assert page.startswith("# Parity\n\nWritten by `shardpair check --presets ddp --engines jax-explicit")
    assert "| layout | jax-explicit | torch-compiler |" in page
    assert "| ddp | " in page
    assert len(page.split()) < 300


@pytest.mark.parametrize(
    ("engines", "optimizer"),
    [
        (("jax-compiler", "torch-library"), ("adamw",)),
        (("torch-manual", "jax-manual"), ("sgd", "--optimizer.momentum", "0.9")),
    ],
)
def test_pair_agrees_in_bfloat16(shardpair, engines, optimizer):
    """The pair against each other: mixed precision, both optimizers, nothing that hides a scale."""
    done = shardpair(
        "run", "check", "--engines", *engines, "--layout.dp_replicate", "2", "--json",
        "--precision.dtype", "bfloat16", "--optimizer.name", *optimizer, "--optimizer.grad_clip", "0", *SMALL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (shardpair.folder / "runs").is_dir()


def test_interleaved_schedule_of_pytorch(shardpair):
    asked = ("check", "--engines", "torch-library", "--presets", "pp_interleaved", "--model.dropout", "0.2")
    done = shardpair(*asked, "--train.max_iters", "3", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (verdict,) = json.loads(done.stdout)["values"]["outcome"]["verdicts"]
    assert max(rung["error"] for rung in verdict["rungs"]) <= 1e-10


def test_every_cell_is_a_case_or_has_a_reason():
    cases, left_out = Check(presets=("all",), variants=("all",)).cases(load("check"))
    layouts = [name for name, preset in PRESETS.items() if preset.axis and not preset.ranks_per_ep]
    names = {f"{engine}.{layout}" for engine in STUDIED for layout in layouts}
    assert {name for name in (*cases, *left_out) if "," not in name and "reference" not in name} == names
    assert not cases.keys() & left_out.keys()
    references = [name for name, case in cases.items() if not case.against]
    sgd = f"reference, {VARIANTS[1]}"
    assert references == ["reference", f"reference, {VARIANTS[0]}", sgd, f"reference, {VARIANTS[2]}"]
    assert len([case for case in cases.values() if case.against == sgd]) > 100
    assert cases["jax-compiler.ddp_pp"].experiment.layout.schedule == "gpipe"  # it has no 1F1B


def test_the_reference_is_unsharded():
    layout = Layout(tp=2, pp=2, dp_shard=2, zero=3, microbatches=4)
    sharded = msgspec.structs.replace(load("check"), layout=layout)
    reference, *cases = rungs_of_engines(sharded, list(STUDIED), 4)[0].values()
    assert reference.experiment.layout.devices == 1
    assert {case.experiment.layout.devices for case in cases} == {1, 4}
    (reference, *_) = fault_cases(sharded, ["torch-manual"], names=["no_clip"], devices=4).values()
    assert reference.experiment.layout.devices == 1
