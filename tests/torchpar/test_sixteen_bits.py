"""Runs in 16 bits: right runs pass, and timed windows must have the dtype, too."""

import math
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import pytest
import torch
from msgspec.structs import replace

from compare.contract.request import Request
from compare.contract.timing import Timing
from compare.judge.alone import judged
from compare.judge.rounding import loss_rounding
from compare.judge.rungs import NAMED
from compare.numerics.initial_weights import write_weights
from compare.numerics.loss_scale import LARGEST
from compare.numerics.parameters import initial_parameters
from compare.spec.experiment import Data, Experiment, edited
from tests.support.records import climbed
from tests.support.torch_runs import trained
from tests.support.warm import run_torchpar
from torchpar.run import Run
from torchpar.train import unscale_gradients


@pytest.fixture
def half(tiny: Experiment) -> Experiment:
    """With accumulation, and dropout, without which a kernel hides the softmax."""
    sections = {
        "model": {"dropout": 0.1},
        "train": {"max_iters": 4, "gradient_accumulation_steps": 3},
        "optimizer": {"warmup_iters": 0},
        "precision": {"dtype": "bfloat16"},
    }
    return edited(replace(tiny, data=Data(source="synthetic")), sections)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("engine", ["torch-manual", "torch-library"])
def test_run_in_16_bits_passes(tmp_path, half, engine, dtype):
    spec = edited(half, {"precision": {"dtype": dtype}})
    right = trained(tmp_path / "reference", spec, ladder=True, later_step=3)
    verdict = climbed(right, trained(tmp_path / "candidate", spec, engine=engine, ladder=True, later_step=3))
    assert verdict.passed, verdict.sentence()


def test_timed_window_in_another_dtype_fails(tmp_path, half):
    timing = Timing(warmup=3, window=2, windows=1, single=1)
    spec = edited(half, {"train": {"max_iters": timing.steps}, "model": {"dropout": 0.0}})
    assert judged(trained(tmp_path / "right", spec, timing=timing)).alone.objections == []

    autocast = Run.autocast

    def wrong(run: Run) -> AbstractContextManager:
        return nullcontext() if run.request.is_in_window(run.state.step) else autocast(run)

    with patch.object(Run, "autocast", wrong):
        (objection,) = judged(trained(tmp_path / "wrong", spec, timing=timing)).alone.objections
    assert objection.startswith("precision.dtype = bfloat16 was asked for; found: float32")


def test_larger_logits_have_a_larger_limit(tmp_path, tiny):
    """Weights six times the seed's over 16 tokens: two layouts differ by more than the limit of the table."""
    sections = {
        "model": {"n_layer": 4, "n_embd": 64, "vocab_size": 65},
        "train": {"batch_size": 1, "max_iters": 2},
        "precision": {"dtype": "float16"},
    }
    spec, records = edited(replace(tiny, data=Data(source="synthetic")), sections), []
    large = {name: 6 * w if w.ndim > 1 else w for name, w in initial_parameters(spec).items()}
    write_weights(tmp_path / "large.safetensors", large)
    for tp in (1, 2):
        split = edited(spec, {"layout": {"tp": tp}})
        asked = {"ladder": True, "later_step": 1, "init_from": str(tmp_path / "large.safetensors")}
        request = Request(engine="torch-manual", experiment=split, **asked)
        records.append(run_torchpar(tmp_path / str(tp), request))
    verdict = climbed(*records)
    assert verdict.passed, verdict.sentence()
    assert verdict.error("loss") > NAMED["loss"].limits.float16
    one = records[1].steps[0]
    wrong = replace(records[1], steps=[replace(one, loss=1.001 * one.loss), *records[1].steps[1:]])
    assert climbed(records[0], wrong).failure.rung == "loss"
    assert loss_rounding(replace(records[0], folder=tmp_path), "float16") == 0.0


def test_gradient_that_exceeds_float16_is_infinite():
    """A sum over ranks can exceed float16 where no part does: one device would overflow."""
    largest = LARGEST / 2.0**16
    gradient = torch.tensor([1.0, -largest, math.nan, 3 * largest, -3 * largest]) * 2.0**14
    unscale_gradients({"w": gradient}, 2.0**14, largest=largest)
    assert gradient.tolist()[:2] == [math.inf, -largest]
    assert gradient[2].isnan()
    assert gradient[3:].isinf().all()
