"""Peers: run when they are named, refused by name, and equal."""

import json

import pytest

from compare.cli import main
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError, Layout, Precision
from tests.support.records import CLIMBED

TINY = (
    "--model.n_layer", "2", "--model.n_head", "2", "--model.n_embd", "16", "--model.block_size", "16",
    "--train.max_iters", "3", "--train.batch_size", "4",
)  # fmt: skip


def test_studies_of_our_engines_take_no_peer(capsys):
    for command in ("memory", "faults"):
        with pytest.raises(SystemExit, match="2"):
            main([command, "--engines", "plain-jit"])
        assert "plain-jit" in capsys.readouterr().err


REFUSED = (
    ("nanogpt-loop", {"dp_replicate": 2}, "nanogpt-loop: it trains on one device, and the layout has 2"),
    (
        "nanogpt-loop",
        {"dp_shard": 2, "zero": 1},
        "nanogpt-loop: it trains on one device, and the layout has 2",
    ),
    (
        "nanogpt-loop",
        {"pp": 2, "microbatches": 2},
        "nanogpt-loop: it trains on one device, and the layout has 2",
    ),
    ("nanogpt-loop", {"remat": "full"}, "recomputes nothing in backward (layout.remat = full)"),
    ("plain-jit", {"dp_replicate": 4}, "plain-jit: it trains on one device, and the layout has 4"),
)


def test_what_a_peer_cannot_do_is_refused_by_name():
    for peer, fields, says in REFUSED:
        with pytest.raises(ExperimentError) as refusal:
            ENGINES[peer].require(Layout(**fields))
        assert says in str(refusal.value)
    with pytest.raises(ExperimentError, match="float16; possible: float64, float32, bfloat16"):
        ENGINES["plain-jit"].require_experiment(Experiment(precision=Precision(dtype="float16")))


def test_peers_on_one_device_pass_the_ladder(shardpair):
    done = shardpair(
        "run", "check", *TINY, "--train.gradient_accumulation_steps", "2", "--optimizer.warmup_iters", "1",
        "--engines", "torch-manual", "nanogpt-loop", "plain-jit", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = json.loads(done.stdout)["verdicts"]
    assert [verdict["candidate"] for verdict in verdicts] == ["nanogpt-loop", "plain-jit"]
    for verdict in verdicts:
        assert [rung["rung"] for rung in verdict["rungs"]] == CLIMBED
        assert max(rung["error"] for rung in verdict["rungs"]) <= 1e-10
