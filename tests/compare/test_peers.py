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


@pytest.mark.parametrize("command", ["memory", "faults"])
def test_studies_of_our_engines_take_no_peer(capsys, command):
    assert main([command, "--engines", "plain-jit"]) == 2
    assert "plain-jit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("peer", "layout", "words"),
    [
        ("nanogpt-loop", Layout(dp_replicate=2), "it trains on one device, and the layout has 2"),
        ("nanogpt-loop", Layout(dp_shard=2, zero=1), "it trains on one device, and the layout has 2"),
        ("nanogpt-loop", Layout(pp=2, microbatches=2), "it trains on one device, and the layout has 2"),
        ("nanogpt-loop", Layout(remat="full"), "recomputes nothing in backward (layout.remat = full)"),
        ("plain-jit", Layout(dp_replicate=4), "it trains on one device, and the layout has 4"),
    ],
    ids=["ddp", "zero1", "pp", "remat", "jit"],
)
def test_peer_rejects_layout(peer, layout, words):
    with pytest.raises(ExperimentError) as refusal:
        ENGINES[peer].require_experiment(Experiment(layout=layout))
    assert str(refusal.value).startswith(f"{peer}: ")
    assert words in str(refusal.value)


def test_peer_rejects_dtype():
    with pytest.raises(ExperimentError, match="float16; possible: float64, float32, bfloat16"):
        ENGINES["plain-jit"].require_experiment(Experiment(precision=Precision(dtype="float16")))


def test_peers_on_one_device_pass_the_ladder(shardpair):
    done = shardpair(
        "run", "check", *TINY, "--train.gradient_accumulation_steps", "2", "--optimizer.warmup_iters", "1",
        "--engines", "torch-manual", "nanogpt-loop", "plain-jit", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = json.loads(done.stdout)["values"]["outcome"]["verdicts"]
    assert [verdict["candidate"] for verdict in verdicts] == ["nanogpt-loop", "plain-jit"]
    for verdict in verdicts:
        assert [rung["rung"] for rung in verdict["rungs"]] == CLIMBED
        assert max(rung["error"] for rung in verdict["rungs"]) <= 1e-10
