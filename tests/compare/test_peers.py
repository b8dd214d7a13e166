"""Peers: run when they are named, refused by name, left out where they are not installed, and equal."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from records import CLIMBED

from compare.cli import main
from compare.execute import packages
from compare.execute.packages import missing_package
from compare.spec.engines.engine import Engine
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError, Layout, Precision

TINY = (
    "--model.n_layer", "2", "--model.n_head", "2", "--model.n_embd", "16", "--model.block_size", "16",
    "--train.max_iters", "3", "--train.batch_size", "4",
)  # fmt: skip
PIP_LINE = "deepspeed is not installed: pip install 'shardpair[deepspeed]'"


def test_studies_of_our_engines_take_no_peer(capsys):
    for command in ("memory", "faults"):
        with pytest.raises(SystemExit, match="2"):
            main([command, "--engines", "plain-jit"])
        assert "plain-jit" in capsys.readouterr().err


REFUSED = (
    ("nanogpt-loop", {"dp_replicate": 2}, "nanogpt-loop: it trains on one device, and the layout has 2"),
    ("nanogpt-loop", {"dp_shard": 2, "zero": 1}, "layout.zero = 1: nanogpt-loop has no stage"),
    ("nanogpt-loop", {"pp": 2, "microbatches": 2}, "nanogpt-loop has no pipeline"),
    ("nanogpt-loop", {"remat": "full"}, "recomputes nothing in backward (layout.remat = full)"),
    ("plain-jit", {"dp_replicate": 4}, "plain-jit: it trains on one device, and the layout has 4"),
    ("deepspeed", {}, "deepspeed: it is here for ZeRO: give layout.dp_shard = 2 or more"),
    ("deepspeed", {"dp_shard": 2, "zero": 3, "dp_replicate": 2}, "it shards over all ranks"),
)


def test_what_a_peer_cannot_do_is_refused_by_name():
    for peer, fields, says in REFUSED:
        with pytest.raises(ExperimentError) as refusal:
            ENGINES[peer].require(Layout(**fields))
        assert says in str(refusal.value)
    sharded = Experiment(layout=Layout(dp_shard=2, zero=1), precision=Precision(dtype="float64"))
    with pytest.raises(ExperimentError, match=r"dtype = float64: deepspeed has float32 \(DeepSpeed"):
        ENGINES["deepspeed"].require_experiment(sharded)
    ENGINES["torch-manual"].require_experiment(sharded)


@pytest.fixture
def without_deepspeed(monkeypatch, tmp_path):
    """A Python in which DeepSpeed is not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else find(name))
    monkeypatch.chdir(tmp_path)


ZERO1 = ("--preset", "zero1", "--devices", "2", "--precision.dtype", "float32", "--dry_run")


def test_what_is_not_installed_is_left_out_with_the_line_that_installs_it(without_deepspeed, capsys):
    assert main(["run", "check", *TINY, "--engines", "torch-manual", "deepspeed", *ZERO1]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"left out: deepspeed: {PIP_LINE}" in printed
    assert "1 case of 3 steps" in printed


def test_packages_are_looked_for_in_the_python_that_runs_the_engine(monkeypatch):
    def needing(package: str) -> Engine:
        return Engine(name="other", side="torchpar", gradient_sync=("none",), decides="a test", needs=package)

    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)  # of this Python
    here = Path(sys.executable)
    other = os.path.join(here.parent, ".", here.name)  # the same, but not by name
    assert missing_package(needing("json"), sys.executable)
    assert not missing_package(needing("json"), other)
    assert "nosuchpackage is not installed" in missing_package(needing("nosuchpackage"), other)


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


@pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason=PIP_LINE)
@pytest.mark.parametrize("zero", ["1", "2", "3"])
def test_deepspeed_passes_the_ladder(zero, shardpair):
    done = shardpair(
        "run", "check", *TINY, "--train.gradient_accumulation_steps", "2", "--precision.dtype", "float32",
        "--layout.dp_shard", "2", "--layout.zero", zero, "--engines", "torch-manual", "deepspeed", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (verdict,) = json.loads(done.stdout)["verdicts"]
    assert [rung["rung"] for rung in verdict["rungs"]] == CLIMBED
