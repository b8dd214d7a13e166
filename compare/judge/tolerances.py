"""Tolerances: the largest difference of two correct runs, per precision and rung, each with its reason.

Engines add the same numbers in another order: across devices, inside a matrix product, in a softmax.
float64 is where equality is proven: its limit is 1e-10 for everything, a hundred times and more above what
rounding does there. In float32 and bfloat16 the limits are set from that noise as measured (the worst case
is beside them) with a decade or so to spare, so that they pass on other machines and sizes; a mistake too
small to show above them shows in `shardpair check`, which is in float64.
"""

import math
from typing import NamedTuple

import numpy as np

from compare.contract.record import Record, read_tensors
from compare.contract.request import Rung
from compare.numerics.parameters import parameter_table, split_qkv
from compare.spec.engines.engine import DTYPES


class Tolerance(NamedTuple):
    """The largest relative error that passes."""

    limit: float
    steps: int = 0
    """Number of first steps that it holds for; 0 for all. The verdict says so."""


_EXACT = ("request", "batch", "initial_weights", "loss_scale", "strategy")
"""Rungs that have no error: what was asked for, copied, or observed. In float16 engines and layouts sum over
different numbers of rows, and may part at the edge of an overflow: lower precision.loss_scale to compare away
from it."""
_LIMITS = {  # behind them the worst measured
    # sums in another order, averaged over all tokens
    "loss": (1e-10, 1e-6, 1e-4, 1e-5),  # 2e-16, 2e-7, 3e-6, 1e-6
    # products are rounded at other places, relative to the largest of the tensor
    "gradients": (1e-10, 1e-5, 5e-2, 2e-2),  # 2e-15, 1e-6, 1.3e-2, 2.6e-3
    # one sum over all gradients
    "grad_norm": (1e-10, 1e-5, 5e-3, 1e-3),  # 4e-16, 2e-7, 6e-4, 5e-5
    # Adam makes every gradient an update of about lr, however small: where rounding decides its sign weights
    # part by 2 lr; key biases left out. In 16 bits of how far the tensor moved (rms): signs at random would
    # be 1.4, an update the other way is 2
    "first_weights": (1e-10, 1e-2, 1.4, 0.7),  # 6e-13, 8e-4, 7.1e-1, 7.1e-2
    # gradients, and their squares: twice their error
    "first_moments": (1e-10, 1e-5, 1e-1, 4e-2),  # 2e-15, 2e-6, 2.5e-2, 4e-3
    # the formulas, on the run's own gradients; below float64 weights of 24 bits
    "updates": (1e-10, 2e-6, 2e-6, 2e-6),  # 5e-16, 2.4e-7, 2.4e-7, 2.4e-7
    # rounding of 20 steps, each fed back into the next. In 16 bits of how far the tensor moved: wrong signs
    # average out, and weights that did not move are 1
    "later_weights": (1e-10, 1e-2, 0.7, 0.1),  # 4e-13, 5e-5, 2.1e-1, 1e-2
    # as after 20 steps, for as long as the run is
    "final_weights": (1e-10, 1e-2, 0.7, 0.1),  # 4e-13, 5e-5, 2.4e-1, 1e-2
    # rounding fed back at every step, for norms through the gradients
    "loss_curve": (1e-10, 1e-3, 2e-2, 2e-3),  # 6e-16, 2e-5, 5e-5, 8e-6
    "norm_curve": (1e-10, 1e-2, 1e-1, 1e-2),  # 6e-16, 5e-4, 2e-3, 1e-4
    "evaluations": (1e-10, 1e-3, 2e-2, 2e-3),  # 6e-16, 2e-5, 5e-5, 8e-6
    # choices of experts that went the other way: of the first step `flips_of_rounding`; later of weights that
    # have parted, too
    "routing": (0.0, 0.0, 0.0, 0.0),
    "tokens_per_expert": (0.0, 1e-3, 5e-2, 5e-3),
}
"""Of each of DTYPES."""
_NORMS_OF_BFLOAT16 = 20
"""Steps whose norms are held: later, a change of 1e-7 in the initial weights moves the norm of one of 200
steps by 0.6 in the same engine."""
_COUNTS_OF_16_BITS = 4
"""Steps whose tokens of each expert are held: later, a change of 1e-7 in the initial weights moves 0.4 of a
block's tokens in bfloat16 and 0.2 in float16 in the same engine, within 20 steps; in 4 it moves 0.003."""
TOLERANCES: dict[str, dict[str, Tolerance]] = {
    dtype: dict.fromkeys(_EXACT, Tolerance(0.0))
    | {rung: Tolerance(limits[place]) for rung, limits in _LIMITS.items()}
    for place, dtype in enumerate(DTYPES)
}
for _dtype, _rung, _steps in (
    ("bfloat16", "norm_curve", _NORMS_OF_BFLOAT16),
    ("bfloat16", "tokens_per_expert", _COUNTS_OF_16_BITS),
    ("float16", "tokens_per_expert", _COUNTS_OF_16_BITS),
):
    TOLERANCES[_dtype][_rung] = TOLERANCES[_dtype][_rung]._replace(steps=_steps)
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""The largest relative error of rounding to a dtype."""
SIGMAS = 3
LATER_STEPS = 20
"""After which `later_weights` are measured."""
_APART = {
    **dict.fromkeys(("initial_weights", "first_weights"), "later_weights"),
    **dict.fromkeys(("gradients", "grad_norm", "first_moments"), "norm_curve"),
    "loss": "loss_curve",
    "routing": "tokens_per_expert",
}
"""Rungs of runs that begin with states of their own, and the rung in which rounding had as long to grow."""


def stream_rounding(run: Record) -> float:
    """How far rounding moves a run's stream in its first forward, relative to it; 0 if weights are not there.

    What attention or MLP adds to the stream is off by u of itself, at random, and L layers add 2 L times: the
    stream is off by u sqrt(2 L) of its size, which the last norm makes 1. Attention is off by 1 + a as much:
    a softmax makes of a relative error of its logits, of size a, one of a times that.
    """
    weights, experiment = read_tensors(run.folder, Rung.INITIAL_WEIGHTS), run.manifest.experiment
    shapes = {parameter.name: parameter.shape for parameter in parameter_table(experiment.model)}
    if {name: weights[name].shape for name in weights} != shapes:
        return 0.0
    sharpest, layers = 0.0, experiment.model.n_layer
    for block in (f"blocks.{layer}" for layer in range(layers)):
        qkv = weights[f"{block}.attention.qkv.weight"] * weights[f"{block}.norm1.scale"][:, None, None, None]
        query, key, _ = (_size(part) for part in split_qkv(qkv, experiment.model.group))
        sharpest = max(sharpest, query * key)
    return UNIT[experiment.precision.dtype] * math.sqrt(layers * (1 + (1 + sharpest) ** 2))


def loss_rounding(run: Record) -> float:
    """How far rounding moves the first loss of a run, relative to it; 0 if its weights are not all there.

    The head's logit is the stream's product with a row w times the norm's scale g, and off by |w g| of
    `stream_rounding`; so is the log of their sum. Tokens are off each for itself, and the mean of N by
    1 / sqrt(N). In 400 models with weights of std 0.02 to 0.2, 2 to 12 layers, 16 and 128 tokens, losses
    parted by 0.2 to 1.1 of that (rms), 1.9 at most.
    """
    if not (turned := stream_rounding(run)):
        return 0.0
    weights = read_tensors(run.folder, Rung.INITIAL_WEIGHTS)
    rows = weights["embedding.token"] * weights["norm.scale"]
    turned *= _size(rows.T) / math.sqrt(run.manifest.experiment.tokens_per_step)
    return turned / (abs(run.steps[0].loss) or 1.0)


def flips_of_rounding(run: Record) -> float:
    """The share of the first step's choices of experts that rounding may turn; 0 in float64, without experts.

    A router's logits are as far off as the stream is, by r of their spread s. If they are normal, the k-th of
    E and the next are nearer to each other than d with a probability of at most 0.4 E d / s; a difference
    that is off by sqrt(2) r s at random turns 0.23 E r of the tokens, one of k choices each. One turned
    token, of however few, may be turned again in every block after. In 162 models of 2 to 8 layers and 4 to
    16 experts, in 16 bits against float32, 0.4 of that were turned (median), 1.6 in bfloat16 and 3.3 in
    float16 at most; two runs in 16 bits round much alike.
    """
    model, dtype = run.manifest.experiment.model, run.manifest.experiment.precision.dtype
    if not model.n_experts or dtype == "float64":
        return 0.0
    shares = 0.23 * model.n_experts * stream_rounding(run) / model.experts_per_token
    return SIGMAS * shares + 1 / (run.manifest.experiment.tokens_per_step * model.experts_per_token)


def _size(weight: np.ndarray) -> float:
    """Of what a weight (C, ..) makes of a normalised stream: the root of the mean square over the rest."""
    return float(np.sqrt(np.square(weight, dtype=np.float64).sum(axis=0).mean()))


def tolerances_for(
    dtype: str, *, steps: int = LATER_STEPS, apart: bool = False, rounding: float = 0.0, flips: float = 0.0
) -> dict[str, Tolerance]:
    """The tolerances of one `precision.dtype`, by rung, for weights that were trained so many steps.

    Apart are runs that each go on from a checkpoint of their own, which keeps their rounding so far.
    `rounding` is `loss_rounding`: of large weights and few tokens more than in the table; `flips` are
    `flips_of_rounding`.
    """
    tolerances = dict(TOLERANCES[dtype])
    tolerances["routing"] = Tolerance(flips)
    counts = tolerances["tokens_per_expert"]
    tolerances["tokens_per_expert"] = counts._replace(limit=counts.limit + flips)
    if SIGMAS * rounding > tolerances["loss"].limit:
        tolerances["loss"] = Tolerance(SIGMAS * rounding)
    if dtype == "float16" and steps < LATER_STEPS:
        # Adam's step for a gradient that is rounding has a random sign. Wrong signs add up as sqrt(n), the
        # way as n: for 32 elements 0.19, 0.115, 0.074, 0.049, 0.034 after 1, 2, 4, 8, 20 steps.
        for rung in ("later_weights", "final_weights"):
            tolerances[rung] = Tolerance(tolerances[rung].limit * math.sqrt(LATER_STEPS / steps))
    if apart:
        tolerances |= {rung: Tolerance(tolerances[like].limit) for rung, like in _APART.items()}
    return tolerances
