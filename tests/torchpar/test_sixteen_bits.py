"""What 16 bits are for, and what not: mistakes that move no number further than rounding does, one by one."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
from msgspec.structs import replace
from torch.nn import functional as F

from compare.contract.timing import Timing
from compare.judge.ladder import climb, objections_by_itself
from compare.judge.tolerances import TOLERANCES, loss_rounding
from compare.numerics.initial_weights import write_weights
from compare.numerics.parameters import initial_parameters
from compare.spec.experiment import Data, Experiment, edited
from tests.support.torch_runs import change_update, of_ranks, spoiled, trained
from torchpar import model
from torchpar.run import Run

Planted = Callable[[], AbstractContextManager]


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().to(x.dtype)


def later_weights(run: Run) -> None:
    change_update(run, lambda old, new: rounded(new) if run.state.step else new)


def later_moments(run: Run) -> None:
    @torch.no_grad()
    def round_them(optimizer, *arguments) -> None:
        for state in optimizer.state.values():
            if run.state.step:
                state["exp_avg_sq"].copy_(rounded(state["exp_avg_sq"]))

    run.engine.optimizer.register_step_post_hook(round_them)


def other_settings(run: Run, **settings: float) -> None:
    """From the second update on."""

    def change(optimizer, *arguments) -> None:
        for group in optimizer.param_groups:
            group.update({name: settings[name] for name in settings if run.state.step and group[name]})

    run.engine.optimizer.register_step_pre_hook(change)


def added_up_in_16_bits(run: Run) -> None:
    @torch.no_grad()
    def round_it(parameter: torch.Tensor) -> None:
        parameter.grad.copy_(rounded(parameter.grad))

    for parameter in run.engine.module.parameters():
        parameter.register_post_accumulate_grad_hook(round_it)


def norm(self: model.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    weight, bias = (p if p is None else p.bfloat16() for p in (self.weight, self.bias))
    return F.layer_norm(x.bfloat16(), x.shape[-1:], weight, bias, self.eps).to(x.dtype)


def residual(self: model.Block, x: torch.Tensor, keys: torch.Tensor | None, turn: None) -> torch.Tensor:
    x = rounded(x + self.attn(self.ln_1(x), keys, turn))
    return rounded(x + self.mlp(self.ln_2(x), keys))


def softmax(q: torch.Tensor, k: torch.Tensor, seen: None) -> torch.Tensor:
    hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    logits = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
    return logits.softmax(-1)


def loss(self: model.GPT, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return self.loss(logits.flatten(0, 1), targets.flatten())


MISTAKES: dict[str, tuple[str, str, Planted]] = {
    "weights of the optimizer": ("updates", "after step 1", partial(spoiled, later_weights)),
    "its second moments": ("updates", "v of ", partial(spoiled, later_moments)),
    "no decay after the first update": (
        *("updates", "after step 1"),
        partial(spoiled, partial(other_settings, weight_decay=0.0)),
    ),
    "another eps after it": ("updates", "after step 1", partial(spoiled, partial(other_settings, eps=1e-6))),
    "gradients": ("strategy", "dtype in which gradients are", partial(spoiled, added_up_in_16_bits)),
    "LayerNorm": ("strategy", "dtype of the norm", partial(patch.object, model.LayerNorm, "forward", norm)),
    "stream": ("strategy", "dtype of the residual", partial(patch.object, model.Block, "forward", residual)),
    "softmax": ("strategy", "dtype of the softmax", partial(patch.object, model, "causal_weights", softmax)),
    "loss": ("loss", "loss of step 0", partial(patch.object, model.GPT, "_loss_of", loss)),
}
"""Where each must be red, and what is said there. Only the loss's own moves a number further."""


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


@pytest.mark.parametrize("engine", ["torch-manual", "torch-library"])
def test_every_mistake_of_16_bits_is_red_at_its_rung(tmp_path, half, engine):
    ladder = {"engine": engine, "ladder": True, "later_step": 3}
    for dtype in ("float16", "bfloat16"):
        half = edited(half, {"precision": {"dtype": dtype}})
        right = trained(tmp_path / f"{dtype} reference", half, ladder=True, later_step=3)
        verdict = climb(right, trained(tmp_path / dtype, half, **ladder))
        assert verdict.passed, verdict.sentence()
    for name, (rung, says, plant) in MISTAKES.items():
        with plant():
            verdict = climb(right, trained(tmp_path / name, half, **ladder))
        assert verdict.failure is not None, name
        assert (verdict.failure.rung, says in verdict.failure.worst) == (rung, True), (
            name,
            verdict.sentence(),
        )


def test_a_replica_that_parts_at_the_end_is_seen(tmp_path, tiny):
    """Of the last update's weights no step's loss tells, and the record has rank 0's."""
    spec = edited(replace(tiny, data=Data(source="synthetic")), {"layout": {"dp_replicate": 2}})
    said = []

    def part(run: Run) -> None:
        last = spec.train.max_iters - 1
        if run.rank.rank:
            change_update(run, lambda old, new: old if run.state.step == last else new)

    for plant in (nullcontext(), spoiled(part)):
        with plant:
            said.append(objections_by_itself(trained(tmp_path / str(len(said)), spec, by=of_ranks)))
    right, (objection,) = said
    assert right == []
    assert objection.startswith("weights of replicas at the end = the same on all devices was asked for")
    assert objection.endswith("another embedding.token on device 1 than on device 0 was done")


def test_what_a_timed_window_does_otherwise_is_seen(tmp_path, half):
    timing = Timing(warmup=3, window=2, windows=1, single=1)
    spec = edited(half, {"train": {"max_iters": timing.steps}, "model": {"dropout": 0.0}})
    assert objections_by_itself(trained(tmp_path / "right", spec, timing=timing)) == []

    autocast = Run.autocast

    def wrong(run: Run) -> AbstractContextManager:
        return nullcontext() if run.request.is_in_window(run.state.step) else autocast(run)

    with patch.object(Run, "autocast", wrong):
        (objection,) = objections_by_itself(trained(tmp_path / "wrong", spec, timing=timing))
    assert objection.startswith("precision.dtype = bfloat16 was asked for, and float32")


def test_logits_of_trained_size_are_rounded_further_and_no_mistake(tmp_path, tiny):
    """Weights six times the seed's over 16 tokens: two layouts part by more than the table's limit."""
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
        records.append(trained(tmp_path / str(tp), split, by=of_ranks, **asked))
    verdict = climb(*records)
    assert verdict.passed, verdict.sentence()
    assert verdict.error("loss") > TOLERANCES["float16"]["loss"].limit
    one = records[1].steps[0]
    wrong = replace(records[1], steps=[replace(one, loss=1.001 * one.loss), *records[1].steps[1:]])
    assert climb(records[0], wrong).failure.rung == "loss"
    assert loss_rounding(replace(records[0], folder=tmp_path)) == 0.0  # without weights in the record
