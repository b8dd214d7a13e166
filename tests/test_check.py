"""Every engine and every rung of its ladder on four devices against one unsharded device."""

import json

import pytest

from compare.contract.engines import ENGINES

DEVICES = 4
STEPS = 20


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("engine", list(ENGINES))
def test_engine_equals_one_device(shardpair, engine, dtype):
    done = shardpair(
        "check", "--engines", engine, "--devices", str(DEVICES), "--precision.dtype", dtype, "--json"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["experiment"]["train"]["max_iters"] == STEPS
    expected = [f"{engine}-1", *(f"{engine}-{DEVICES}-{sync}" for sync in ENGINES[engine].gradient_sync)]
    assert [verdict["candidate"] for verdict in outcome["verdicts"]] == expected
    for verdict in outcome["verdicts"]:
        errors = {result["rung"]: result["error"] for result in verdict["rungs"]}
        assert len(errors) == 9, verdict
        assert errors["gradients"] <= (1e-10 if dtype == "float64" else 1e-5)
        if dtype == "float64":
            assert max(errors.values()) <= 1e-10
    for name, cost in zip(outcome["cases"], outcome["costs"], strict=True):
        sharded = f"-{DEVICES}-" in name
        assert cost["devices"] == (DEVICES if sharded else 1)
        assert (cost["comm_bytes"] > 0) == sharded


@pytest.mark.parametrize("engines", [("jax-compiler", "torch-library"), ("torch-manual", "jax-manual")])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_pair_agrees_in_bfloat16_and_without_clipping(shardpair, engines, optimizer):
    """The pair against each other: mixed precision, both optimizers, nothing that hides a scale."""
    done = shardpair(
        "run", "check", "--engines", *engines, "--layout.dp_replicate", "2", "--json",
        "--precision.dtype", "bfloat16", "--optimizer.name", optimizer, "--optimizer.momentum", "0.9",
        "--optimizer.grad_clip", "0",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (shardpair.folder / "runs").is_dir()
