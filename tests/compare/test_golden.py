"""nanoGPT's own numbers: they are what they were made, and every engine has them."""

import json
import math
import tomllib

import numpy as np
import pytest

from compare.commands.check import GOLDEN as EXPERIMENT
from compare.commands.check import SGD
from compare.contract.record import read_tensors
from compare.contract.request import Rung
from compare.judge.goldens import folder_of, read_golden
from compare.judge.rungs import NAMED
from compare.judge.verdict import errors_by_place
from compare.numerics.data import open_corpus
from compare.numerics.optimizer import reference_step
from compare.numerics.parameters import parameter_table
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import named_experiments
from tests.support.numpy_gpt import numpy_loss
from tests.support.records import OF_EXPERTS

RUNGS = [rung for rung in NAMED if rung not in ("loss_scale", "final_weights", *OF_EXPERTS)]
"""Rungs of a golden: `later_weights` has its last weights."""


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_committed_numbers_are_nanogpts(optimizer):
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
        error, worst = max(errors_by_place(NAMED["gradients"], read_tensors(folder, rung), found))
        assert error < 1e-14, (rung, worst)


def test_nanogpt_defaults_are_not_spelled_out():
    """Otherwise a wrong default of the experiment would not be used, and would not show."""
    spelled = tomllib.loads(named_experiments()[EXPERIMENT].read_text())
    assert not spelled["model"].keys() & {"norm_eps", "activation"}
    ours_too = {"name", "beta1", "beta2", "eps", "decay", "weight_decay", "decay_lr"}
    assert not spelled["optimizer"].keys() & ours_too
    assert not spelled["train"].keys() & {"seed"}
    assert SGD == {"name": "sgd", "momentum": 0.9}


ON_TWO = ("--presets", "fsdp", "--devices", "2")
SHARDED = ("jax-manual", "torch-manual")
"""Engines that are compared with nanoGPT on two devices; test_check.py compares them on one device."""


@pytest.mark.parametrize("engine", STUDIED)
def test_engine_has_nanogpt_numbers(shardpair, engine, request):
    if engine == "jax-manual":  # on two devices: collectives, too, are compiled as a user's are
        request.getfixturevalue("default_xla")
    done = shardpair(
        "check", "--against", "nanogpt", "--engines", engine, "--json", *(ON_TWO if engine in SHARDED else ())
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = json.loads(done.stdout)["values"]["outcome"]["verdicts"]
    layout = ".fsdp" if engine in SHARDED else ""
    assert [verdict["candidate"] for verdict in verdicts] == [f"{engine}{layout}", f"{engine}{layout}.sgd"]
    for verdict in verdicts:
        assert [rung["rung"] for rung in verdict["rungs"]] == RUNGS
        assert max(rung["error"] for rung in verdict["rungs"]) <= 1e-10
