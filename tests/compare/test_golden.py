"""nanoGPT's own numbers: they are what they were made, every engine has them, and a wrong default has not."""

import json
import math
import tomllib

import msgspec
import numpy as np
import pytest
import warm
from records import outcome_of

from compare.contract.record import read_tensors
from compare.contract.request import Rung
from compare.judge.goldens import NANOGPT, folder_of, read_golden
from compare.judge.ladder import LADDER
from compare.judge.tensor_errors import worst_tensor
from compare.numerics.data import open_corpus
from compare.numerics.optimizer import reference_step
from compare.numerics.parameters import parameter_table
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import edited, load, named_experiments
from compare.studies.check import GOLDEN as EXPERIMENT
from compare.studies.check import SGD, Check
from compare.studies.grid import grid
from compare.studies.run import Run
from compare.study import run

RUNGS = [rung for rung in LADDER if rung not in ("loss_scale", "final_weights")]
"""Of a golden: its last weights are those of the last step, and stand at later_weights."""


def layer_norm(x, scale, bias):
    """nanoGPT's LayerNorm, 1e-5 and all."""
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + bias


def gelu(x):
    """x times the normal distribution function: no approximation."""
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def attention(x_BTC, weight_C3HD, bias_3HD, out_HDC, out_bias_C):
    """Causal self-attention in so many words."""
    q, k, v = (np.einsum("btc,chd->bhtd", x_BTC, weight_C3HD[:, i]) + bias_3HD[i][:, None] for i in range(3))
    logits_BHTT = np.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(q.shape[-1])
    length = x_BTC.shape[1]
    logits_BHTT[..., np.triu(np.ones((length, length), bool), 1)] = -np.inf
    weights = np.exp(logits_BHTT - logits_BHTT.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhts,bhsd,hdc->btc", weights, v, out_HDC) + out_bias_C


def loss_of(w, inputs_BT, targets_BT, layers):
    """nanoGPT's forward pass in NumPy: mean cross-entropy."""
    x = w["embedding.token"][inputs_BT] + w["embedding.position"][: inputs_BT.shape[1]]
    for b in (f"blocks.{layer}." for layer in range(layers)):
        normed = layer_norm(x, w[b + "norm1.scale"], w[b + "norm1.bias"])
        names = ("qkv.weight", "qkv.bias", "out.weight", "out.bias")
        x = x + attention(normed, *(w[f"{b}attention.{name}"] for name in names))
        normed = layer_norm(x, w[b + "norm2.scale"], w[b + "norm2.bias"])
        hidden = gelu(normed @ w[b + "mlp.up.weight"] + w[b + "mlp.up.bias"])
        x = x + hidden @ w[b + "mlp.down.weight"] + w[b + "mlp.down.bias"]
    logits = layer_norm(x, w["norm.scale"], w["norm.bias"]) @ w["embedding.token"].T
    logits -= logits.max(-1, keepdims=True)
    log_z = np.log(np.exp(logits).sum(-1))
    return np.mean(log_z - np.take_along_axis(logits, targets_BT[..., None], -1)[..., 0])


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_committed_numbers_are_nanogpts(optimizer):
    """Recomputed here, in NumPy, without the contract: the first loss, the whole schedule, the norm."""
    folder = folder_of(optimizer)
    record = read_golden(optimizer)
    batch, weights = read_tensors(folder, Rung.BATCH), read_tensors(folder, Rung.INITIAL_WEIGHTS)
    rows = batch["inputs"].reshape(-1, 16), batch["targets"].reshape(-1, 16)
    assert len(rows[0]) == 8
    assert record.steps[0].loss == pytest.approx(loss_of(weights, *rows, layers=2), rel=1e-13)
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
    losses = [
        loss_of(read_tensors(folder, Rung.LATER_WEIGHTS), x.reshape(-1, 16), y.reshape(-1, 16), layers=2)
        for x, y in windows
    ]
    assert record.evaluations[-1].validation == pytest.approx(np.mean(losses), rel=1e-12)
    # nanoGPT's clipping, AdamW and choice of what decays, as the contract's oracle has them; SGD alike.
    gradients, table = read_tensors(folder, Rung.GRADIENTS), parameter_table(experiment.model)
    after, moments = reference_step(experiment.optimizer, table, weights, gradients, {}, 0)
    assert len(moments) == {"adamw": 2, "sgd": 1}[optimizer]
    kept = {Rung.FIRST_WEIGHTS: after} | {Rung(f"first_{name}"): moment for name, moment in moments.items()}
    for rung, found in kept.items():
        error, worst = worst_tensor(found, read_tensors(folder, rung))
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
"""Engines that are held to nanoGPT on two devices. That they are the same on one, test_check.py says."""


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
    """All engines would have it, and agree: only nanoGPT's numbers can tell. By AdamW and by SGD in turn."""
    right, rows = load(EXPERIMENT), {}
    for place, (name, (wrong, _)) in enumerate(WRONG.items()):
        by = {"optimizer": SGD} if place % 2 else {}
        rows[name] = edited(edited(right, by), wrong)
    asks = {"ladder": True, "later_step": right.train.max_iters}
    cases, _ = grid(["torch-manual"], rows, against=NANOGPT, **asks)
    how = {"cache_dir": cache_dir, "torch_python": warm.python(), "quiet": True, "keep_tensors": True}
    study = msgspec.convert({**msgspec.to_builtins(right), **how}, Run)
    (tmp_path / "run").mkdir()
    planned = study._frozen(outcome_of(right, cases=cases, options={"against": "nanogpt"}), tmp_path / "run")
    outcome = run(study, planned, tmp_path / "run")
    findings = Check.findings(outcome, tmp_path / "run")
    assert not findings.passed
    red = {verdict.candidate: verdict.failure and verdict.failure.rung for verdict in outcome.verdicts}
    assert red == {f"torch-manual.{name}": rung for name, (_, rung) in WRONG.items()}
    assert "FAIL at loss" in findings.sentence
