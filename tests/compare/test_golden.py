"""nanoGPT's own numbers: they are what they were made, every engine has them, and a wrong default has not."""

import json
import math
import tomllib

import msgspec
import numpy as np
import pytest

from compare.commands.check import GOLDEN as EXPERIMENT
from compare.commands.check import SGD, Check
from compare.commands.run import Run
from compare.contract.record import read_tensors
from compare.contract.request import Rung
from compare.execute.launchers import HERE
from compare.flags import checked_pythons
from compare.judge.goldens import NANOGPT, folder_of, read_golden
from compare.judge.rungs import LADDER, NAMED, largest_error
from compare.numerics.data import open_corpus
from compare.numerics.optimizer import reference_step
from compare.numerics.parameters import parameter_table
from compare.run.rounds import run_missing
from compare.setup.grid import grid
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import edited, load, named_experiments
from tests.support import warm
from tests.support.numpy_gpt import numpy_loss
from tests.support.records import OF_EXPERTS, outcome_of

RUNGS = [rung for rung in LADDER if rung not in ("loss_scale", "final_weights", *OF_EXPERTS)]
"""Rungs of a golden: `later_weights` has its last weights."""


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_committed_numbers_are_nanogpts(optimizer):
    """Recomputed here, in NumPy, without the contract: the first loss, the whole schedule, the norm."""
    folder = folder_of(optimizer)
    record = read_golden(optimizer)
    batch, weights = read_tensors(folder, Rung.BATCH), read_tensors(folder, Rung.INITIAL_WEIGHTS)
    model, rows = record.manifest.experiment.model, [batch[x].reshape(-1, 16) for x in ("inputs", "targets")]
    assert len(rows[0]) == 8
    assert record.steps[0].loss == pytest.approx(numpy_loss(model, weights, *rows), rel=1e-13)
    for step in record.steps:
        cosine = 1e-3 + 0.5 * (1 + math.cos(math.pi * min(step.step - 4, 20) / 20)) * 9e-3
        expected = 1e-2 * (step.step + 1) / 5 if step.step < 4 else cosine
        assert step.lr == pytest.approx(expected, rel=1e-14)
    assert [step.step for step in record.steps] == list(range(30))
    squares = sum((g**2).sum() for g in read_tensors(folder, Rung.GRADIENTS).values())
    assert record.steps[0].grad_norm == pytest.approx(math.sqrt(squares), rel=1e-13)
    norms = [step.grad_norm for step in record.steps]
    if optimizer == "adamw":
        assert min(norms) < 0.8 < max(norms[:1] + norms[10:]), "clipping must bite, and not in all steps"
    else:
        assert min(norms) > 0.8, "clipping must bite"
    assert [one.step for one in record.evaluations] == [0, 10, 20, 30]
    corpus, experiment = open_corpus(record.manifest.experiment), record.manifest.experiment
    windows = [corpus.evaluation_batch(experiment, "validation", 30, index) for index in range(2)]
    later = read_tensors(folder, Rung.LATER_WEIGHTS)
    losses = [numpy_loss(model, later, x.reshape(-1, 16), y.reshape(-1, 16)) for x, y in windows]
    assert record.evaluations[-1].validation == pytest.approx(np.mean(losses), rel=1e-12)
    # nanoGPT's clipping, AdamW and choice of what decays, as the contract's oracle has them; SGD alike.
    gradients, table = read_tensors(folder, Rung.GRADIENTS), parameter_table(experiment.model)
    after, moments = reference_step(experiment.optimizer, table, weights, gradients, {}, 0)
    assert len(moments) == {"adamw": 2, "sgd": 1}[optimizer]
    kept = {Rung.FIRST_WEIGHTS: after} | {Rung(f"first_{name}"): moment for name, moment in moments.items()}
    for rung, found in kept.items():
        error, worst = largest_error(NAMED["gradients"], read_tensors(folder, rung), found)
        assert error < 1e-14, (rung, worst)


def test_what_nanogpt_decides_is_not_spelled_out():
    """Else a wrong default would not be used, and would not show."""
    spelled = tomllib.loads(named_experiments()[EXPERIMENT].read_text())
    assert not spelled["model"].keys() & {"norm_eps", "activation"}
    ours_too = {"name", "beta1", "beta2", "eps", "decay", "weight_decay", "decay_lr"}
    assert not spelled["optimizer"].keys() & ours_too
    assert not spelled["train"].keys() & {"seed"}
    assert SGD == {"name": "sgd", "momentum": 0.9}


ON_TWO = ("--presets", "fsdp", "--devices", "2")
SHARDED = ("jax-manual", "torch-manual")
"""Engines that are compared with nanoGPT on two devices; test_check.py compares all on one device."""


@pytest.mark.parametrize("engine", STUDIED)
def test_every_engine_computes_what_nanogpt_does(shardpair, engine, request):
    if engine == "jax-manual":  # on two devices: collectives, too, are compiled as a user's are
        request.getfixturevalue("default_xla")
    done = shardpair(
        "check", "--against", "nanogpt", "--engines", engine, "--json", *(ON_TWO if engine in SHARDED else ())
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = json.loads(done.stdout)["verdicts"]
    layout = ".fsdp" if engine in SHARDED else ""
    assert [verdict["candidate"] for verdict in verdicts] == [f"{engine}{layout}", f"{engine}{layout}.sgd"]
    for verdict in verdicts:
        assert [rung["rung"] for rung in verdict["rungs"]] == RUNGS
        assert max(rung["error"] for rung in verdict["rungs"]) <= 1e-10


WRONG = {
    "norm_eps": ({"model": {"norm_eps": 1e-6}}, "loss"),
    "activation": ({"model": {"activation": "gelu_tanh"}}, "loss"),
    "decay_lr": ({"optimizer": {"decay_lr": False}}, "first_weights"),
    "weight_decay": ({"optimizer": {"weight_decay": 0.2}}, "first_weights"),
    "eval_iters": ({"train": {"eval_iters": 2}}, "evaluations"),
}
"""Shared defaults, and the rung at which a wrong one shows."""


@pytest.mark.slow
def test_a_wrong_shared_default_turns_it_red(tmp_path, cache_dir):
    """All engines would have it, and agree: only nanoGPT's numbers differ. AdamW and SGD alternate."""
    right, rows = load(EXPERIMENT), []
    for place, (name, (wrong, _)) in enumerate(WRONG.items()):
        by = {"optimizer": SGD} if place % 2 else {}
        rows.append(({"layout": name}, edited(edited(right, by), wrong)))
    asks = {"ladder": True, "later_step": right.train.max_iters}
    cases, _ = grid(["torch-manual"], rows, against=NANOGPT, **asks)
    how = {"cache_dir": cache_dir, "torch_python": warm.python(), "quiet": True, "keep_tensors": True}
    study = msgspec.convert({**msgspec.to_builtins(right), **how}, Run)
    (tmp_path / "run").mkdir()
    pythons, folder = checked_pythons(study), tmp_path / "run"
    outcome = outcome_of(right, cases=cases, options={"against": "nanogpt"})
    outcome = run_missing(study, study._frozen(outcome, folder, pythons), folder, pythons=pythons, hosts=HERE)
    findings = Check.findings(outcome, tmp_path / "run")
    assert not findings.passed
    red = {verdict.candidate: verdict.failure and verdict.failure.rung for verdict in outcome.verdicts}
    assert red == {f"torch-manual.{name}": rung for name, (_, rung) in WRONG.items()}
    assert "FAIL at loss" in findings.sentence
