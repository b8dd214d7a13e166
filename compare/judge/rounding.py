"""Rounding that depends on a run's own weights: of the first loss, and of an expert's choice."""

import math

import numpy as np

from compare.contract.record import Record, read_tensors
from compare.contract.request import Rung as Recorded
from compare.numerics.parameters import parameter_table, split_qkv

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Largest relative error of rounding to a dtype."""
SIGMAS = 3


def coarser(a: Record, b: Record) -> str:
    """The coarser dtype of two runs, whose limits apply to both."""
    return max((run.manifest.experiment.precision.dtype for run in (a, b)), key=UNIT.__getitem__)


def stream_rounding(run: Record, dtype: str) -> float:
    """Relative error of the residual stream in the first forward pass; 0 without initial weights.

    Each of 2 L additions to the stream has a random relative error u, so the stream is off by u sqrt(2 L).
    Attention is off by 1 + a times as much: softmax turns a relative error of its logits, of size a, into a
    relative error a times as large.
    """
    model, weights = run.manifest.experiment.model, read_tensors(run.folder, Recorded.INITIAL_WEIGHTS)
    shapes = {parameter.name: parameter.shape for parameter in parameter_table(model)}
    if {name: weights[name].shape for name in weights} != shapes:
        return 0.0
    sharpest = 0.0
    for block in (f"blocks.{layer}" for layer in range(model.n_layer)):
        qkv = weights[f"{block}.attention.qkv.weight"] * weights[f"{block}.norm1.scale"][:, None, None, None]
        query, key, _ = (_gain(part) for part in split_qkv(qkv, model.group))
        sharpest = max(sharpest, query * key)
    return UNIT[dtype] * math.sqrt(model.n_layer * (1 + (1 + sharpest) ** 2))


def loss_rounding(run: Record, dtype: str) -> float:
    """Relative error of the first loss from rounding; 0 without initial weights.

    A logit is the product of the stream with a row w of the head times the norm's scale g. Its error is
    |w g| times `stream_rounding`. Errors of N tokens are independent, so their mean has 1 / sqrt(N) of it.
    In 400 models (std 0.02 to 0.2, 2 to 12 layers, 16 and 128 tokens) measured differences were 0.2 to 1.1
    times this (rms), 1.9 at most.
    """
    if not (stream := stream_rounding(run, dtype)):
        return 0.0
    weights = read_tensors(run.folder, Recorded.INITIAL_WEIGHTS)
    rows = weights["embedding.token"] * weights["norm.scale"]
    error = stream * _gain(rows.T) / math.sqrt(run.manifest.experiment.tokens_per_step)
    return error / (abs(run.steps[0].loss) or 1.0)


def flips_of_rounding(run: Record, dtype: str) -> float:
    """Share of the first step's expert choices that rounding may change; 0 in float64 and without experts.

    A router's logits have the relative error r of the stream. If they are normal with spread s, the k-th and
    the next of E logits are nearer than d with probability 0.4 E d / s at most. A random error sqrt(2) r s
    then changes 0.23 E r of the tokens, one of k choices each. In 162 models (2 to 8 layers, 4 to 16
    experts, 16 bits against float32) the median was 0.4 of this, the maximum 3.3.
    """
    experiment = run.manifest.experiment
    if not experiment.model.n_experts or dtype == "float64":
        return 0.0
    k = experiment.model.experts_per_token
    share = 0.23 * experiment.model.n_experts * stream_rounding(run, dtype) / k
    return SIGMAS * share + 1 / (experiment.tokens_per_step * k)  # one token always may change


def _gain(weight: np.ndarray) -> float:
    """Root mean square of what a weight (C, ..) makes of a normalised stream."""
    return float(np.sqrt(np.square(weight, dtype=np.float64).sum(axis=0).mean()))
