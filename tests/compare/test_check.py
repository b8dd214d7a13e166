"""Every engine and every rung of its ladder on four devices against one unsharded device."""

import json

import msgspec
import pytest

from compare.commands.check import rungs_of_engines
from compare.commands.faults import fault_cases
from compare.spec.engines.registry import SIDES, STUDIED
from compare.spec.experiment import Layout, load
from tests.support.records import CLIMBED

DEVICES = 4
STEPS = 3
SMALL = ("--model.n_layer", "2", "--train.max_iters", str(STEPS))


@pytest.mark.parametrize("side", list(SIDES))
def test_engines_equal_one_device(shardpair, side):
    engines = [engine.name for engine in SIDES[side].engines]
    done = shardpair("check", "--engines", *engines, "--devices", str(DEVICES), *SMALL, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout)
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
    verdicts = json.loads(done.stdout)["verdicts"]
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
    [(("jax-compiler", "torch-library"), "adamw"), (("torch-manual", "jax-manual"), "sgd")],
)
def test_pair_agrees_in_bfloat16_and_without_clipping(shardpair, engines, optimizer):
    """The pair against each other: mixed precision, both optimizers, nothing that hides a scale."""
    done = shardpair(
        "run", "check", "--engines", *engines, "--layout.dp_replicate", "2", "--json",
        "--precision.dtype", "bfloat16", "--optimizer.name", optimizer, "--optimizer.momentum", "0.9",
        "--optimizer.grad_clip", "0", *SMALL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (shardpair.folder / "runs").is_dir()


def test_the_reference_is_unsharded_whatever_the_layout():
    layout = Layout(tp=2, pp=2, dp_shard=2, zero=3, microbatches=4)
    sharded = msgspec.structs.replace(load("check"), layout=layout)
    reference, *cases = rungs_of_engines(sharded, list(STUDIED), 4)[0].values()
    assert reference.experiment.layout.devices == 1
    assert {case.experiment.layout.devices for case in cases} == {1, 4}
    (reference, *_) = fault_cases(sharded, ["torch-manual"], names=["no_clip"], devices=4).values()
    assert reference.experiment.layout.devices == 1
