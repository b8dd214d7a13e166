"""A run that diverges ends at its step, with one line and exit code 1."""

import math

import pytest
import torch
from msgspec.structs import replace

from compare.contract.record import ERROR, MANIFEST, STEPS_PART, Failure, Step, read_lines
from compare.contract.request import Request
from compare.judge.outcome import read_outcome
from compare.side.ending import DivergedError, explained_failure
from compare.system.json_files import read_json
from torchpar.launch import Rank
from torchpar.record import make_recording
from torchpar.train import set_up, train_steps

# Weights of 1e30 overflow in any layer. One layer and no ladder: one small program to compile.
DIVERGING = ("--optimizer.learning_rate", "1e30", "--optimizer.no-decay_lr")
SMALL = ("--model.n_layer", "1", "--train.max_iters", "6", "--no_ladder")


def test_divergence_names_the_gradient(tiny, tmp_path):
    experiment = replace(tiny, data=replace(tiny.data, source="synthetic"))
    request = Request(engine="torch-manual", experiment=experiment)
    rank = Rank(rank=0, world_size=1, local_rank=0)
    run = set_up(rank, request)
    run.engine.parameters["transformer.h.1.ln_2.weight"].register_hook(lambda gradient: gradient * math.inf)
    before = {name: weight.clone() for name, weight in run.engine.weights().items()}
    record = make_recording(run, tmp_path)
    with pytest.raises(DivergedError) as error:
        train_steps(run, record)
    assert str(error.value).endswith("the first gradient that is not finite: blocks.1.norm2.scale"), (
        error.value
    )
    assert str(error.value).startswith("torch-manual diverged at step 0: its gradient norm is ")
    for name, weight in run.engine.weights().items():
        assert torch.equal(weight, before[name]), name
    (step,) = read_lines(tmp_path / STEPS_PART, Step)
    assert math.isnan(step.grad_norm)
    assert explained_failure(error.value) == Failure(message=str(error.value))


def test_divergence_in_every_engine(shardpair):
    done = shardpair(
        "run", "check", "--engines", "torch-manual", "jax-manual", "--preset", "fsdp", "--devices", "2",
        *DIVERGING, *SMALL, "--run_dir", "runs",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
    for engine in ("torch-manual", "jax-manual"):
        folder = shardpair.folder / "runs" / engine
        message = read_json(folder / ERROR, Failure).message
        assert message.startswith(f"{engine} diverged at step "), message
        assert not (folder / MANIFEST).exists()
        step = read_lines(folder / STEPS_PART, Step)[-1]
        assert f"{engine} diverged at step {step.step}: its " in message
        assert not (math.isfinite(step.loss) and math.isfinite(step.grad_norm))
        assert "inf" not in last.replace("is inf", "")
        assert message in done.stderr
    assert "the first gradient that is not finite: " in done.stderr
    assert "the first weight that is not finite after the step is " in done.stderr
    saved = read_outcome(shardpair.folder / "runs")
    assert set(saved.failures) == {"torch-manual", "jax-manual"}
    assert "torch-manual diverged at step" in saved.sentence()
    assert "jax-manual diverged at step" in saved.sentence()
    assert not saved.passed
