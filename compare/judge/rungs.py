"""The numerics ladder: a table with a row for each rung.

A rung compares one thing of two runs. Rungs come in the order in which training computes things, so the
first one that fails names the kind of mistake: a wrong mean shows in the gradients, a wrong decay in the
first weights, a wrong beta2 in the moments. Gradients come before the optimizer, because Adam and clipping
hide their scale. The last rung is the strategy, which no number shows.

Correct engines add the same numbers in different orders. float64 proves equality: its limit is 1e-10, at
least a hundred times what rounding does there. In other dtypes a limit is about ten times the largest
difference between correct runs (the comment above each row), for other machines and sizes. Mistakes too small
for these limits show in `shardpair check`, which runs in float64.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from compare.contract.record import Record
from compare.contract.request import Rung as Recorded
from compare.judge.alone import INITIAL_WEIGHTS, NORMS, REQUEST, STRATEGY, UPDATE
from compare.judge.errors import Found
from compare.judge.readings import (
    Values,
    curve,
    evaluations,
    experts,
    moments,
    of_choices,
    of_counts,
    of_scale,
    of_tensor,
    scales,
    tensors,
    tokens,
    weights,
)
from compare.judge.rounding import SIGMAS, flips_of_rounding, loss_rounding
from compare.numerics.parameters import storage_dtype
from compare.spec.experiment import Experiment

BATCH = "batch"
LATER_STEPS = 20
"""Steps for which the limits of later weights hold."""
MANY_TOKENS = 4096
"""Tokens of a step, or of an expert in a step, for which the limits of 16 bits hold."""


# Larger limits, for what depends on the run: (the row's limit, reference, candidate, dtype) -> limit.


def for_first_loss(limit: float, reference: Record, candidate: Record, dtype: str) -> float:
    """Large logits have large rounding. A token that went to another expert has another loss: one choice of
    1,024 moved the mean loss by 2e-5."""
    limit = max(limit, SIGMAS * loss_rounding(reference, dtype))
    return limit + 0.2 * rerouted(reference, candidate, dtype)


def for_rerouted(limit: float, reference: Record, candidate: Record, dtype: str) -> float:
    """A token that went to another expert adds its gradient there, and changes the router's. An expert has
    1 / E of a block's N choices. With random directions, n tokens change the expert's gradient by
    sqrt(n E / N). Measured in float16: 3.8e-2 of a router for 1 of 1,024 choices and 8 experts, where the
    formula gives 8.8e-2."""
    model = reference.manifest.experiment.model
    moved = math.sqrt(rerouted(reference, candidate, dtype) * model.n_layer * model.n_experts)
    return limit + min(moved, 0.4)  # a gradient of twice the size still fails


def for_rerouted_squares(limit: float, reference: Record, candidate: Record, dtype: str) -> float:
    """Squares of gradients have twice the error."""
    return 2 * for_rerouted(limit / 2, reference, candidate, dtype)


def rerouted(reference: Record, candidate: Record, dtype: str) -> float:
    """Share of the first step's choices that differ; 0 in float64 and without experts."""
    if dtype == "float64" or not (chosen := experts()(reference)) or not (other := experts()(candidate)):
        return 0.0
    return of_choices("", other["experts"], chosen["experts"], None)[0]


def for_few_tokens(limit: float, reference: Record, candidate: Record, dtype: str) -> float:
    return limit_of_few_tokens(limit, reference.manifest.experiment, dtype)


def limit_of_few_tokens(limit: float, experiment: Experiment, dtype: str) -> float:
    """In 16 bits a mean over N tokens has 1 / sqrt(N) of one token's rounding. An expert has k / E of the
    tokens. The result is below 1, the error of weights that did not move. Measured in float16, norms of 8
    steps: 2.4e-2 with 16 tokens; with experts 1.3e-1, 4e-2, 1.2e-2 with 4, 32, 256 tokens each."""
    if dtype not in ("bfloat16", "float16"):
        return limit
    model, tokens = experiment.model, float(experiment.tokens_per_step)
    if model.n_experts:
        tokens *= model.experts_per_token / model.n_experts
    return max(limit, min(limit * math.sqrt(MANY_TOKENS / tokens), 0.9))


def for_choices(limit: float, reference: Record, candidate: Record, dtype: str) -> float:
    return for_flips(for_few_tokens(limit, reference, candidate, dtype), reference, candidate, dtype)


def for_flips(limit: float, reference: Record, candidate: Record, dtype: str) -> float:
    return limit + flips_of_rounding(reference, dtype)


def for_few_steps(limit: float, reference: Record, candidate: Record, dtype: str) -> float:
    """In float16, Adam's update for a gradient of rounding has a random sign. n wrong signs add up to
    sqrt(n), n right ones to n. Measured for 32 elements: 0.19, 0.115, 0.074, 0.049, 0.034 after 1, 2, 4, 8,
    20 steps."""
    limit = for_few_tokens(limit, reference, candidate, dtype)
    few = dtype == "float16" and len(candidate.steps) < LATER_STEPS
    return limit * math.sqrt(LATER_STEPS / len(candidate.steps)) if few else limit


def for_storage(limit: float, reference: Record, candidate: Record, dtype: str) -> float:
    """If one run keeps float64 and the other float32, initial weights differ by half a unit (6e-8)."""
    kept = {storage_dtype(run.manifest.experiment) for run in (reference, candidate)}
    return limit if len(kept) == 1 else 1e-7


class Limits(NamedTuple):
    """Largest relative error that passes, by dtype."""

    float64: float
    float32: float
    bfloat16: float
    float16: float


EXACT = Limits(0.0, 0.0, 0.0, 0.0)
# Rounding, fed back at each step. In 16 bits relative to the movement: wrong signs average out, and weights
# that did not move are off by 1. Worst measured: 4e-13, 3e-3, 2.4e-1, 1e-2.
TRAINED = Limits(1e-10, 1e-2, 0.7, 0.1)
# Rounding, fed back at each step. Worst measured: 7e-16, 5e-5, 5e-5, 8e-6.
LOSSES = Limits(1e-10, 1e-3, 2e-2, 2e-3)


class Rung(NamedTuple):
    """One row of the ladder."""

    name: str
    read: Callable[[Record], Values] = lambda run: {}
    limits: Limits = EXACT
    error: Callable[..., Found] = of_tensor
    since_start: bool = False
    """Below float64 the error is relative to how far the tensor moved in training."""
    least: float = 0.0
    """The divisor of a relative error is at least this share of the largest entry of all tensors."""
    in_backward: bool = False
    """Backward makes the tensors, the last one first."""
    needs_update: bool = False
    """Skipped if the first step of both runs was skipped."""
    by_step: bool = False
    """Read over all steps; other rungs are about the first step or the ends."""
    first_steps: Mapping[str, int] = {}
    """By dtype: how many first steps are compared; all if the dtype is missing."""
    loosen: Callable[[float, Record, Record, str], float] = lambda limit, reference, candidate, dtype: limit
    apart: str = ""
    """The rung whose limit applies if both runs resume, each from its own checkpoint: rounding has grown."""
    absent: str = "the runs did not record it"
    """Why runs with a whole ladder may lack it; "" if the rung exists for some runs only."""


RUNGS = (
    # Whether both runs did as requested, and requested one training. Exact.
    Rung(REQUEST),
    # The first batch is copied, not computed.
    Rung(BATCH, tensors(Recorded.BATCH)),
    # Drawn from the seed, bitwise equal everywhere, or given.
    Rung(
        INITIAL_WEIGHTS,
        weights(Recorded.INITIAL_WEIGHTS),
        since_start=True,
        loosen=for_storage,
        apart="later_weights",
    ),
    # The choices in the first block. A choice is another one or not. `for_flips` allows what
    # rounding explains.
    Rung("routing", experts(1), error=of_choices, loosen=for_flips, apart="tokens_per_expert", absent=""),
    # Sums in another order, averaged over all tokens. Worst measured: 2e-16, 2e-7, 3e-6, 1e-6.
    Rung(
        "loss", curve("loss", 1), Limits(1e-10, 1e-6, 1e-4, 1e-5), loosen=for_first_loss, apart="loss_curve"
    ),
    # The choices in all blocks. A later block chooses by the output of the blocks before it: a wrong output
    # fails at the loss first.
    Rung(
        "later_routing", experts(), error=of_choices, loosen=for_flips, apart="tokens_per_expert", absent=""
    ),
    # Exact: a mean gradient that exceeds float16 overflows on every layout. Rounding decides within 1e-3 of
    # that edge; lower precision.loss_scale to compare away from it.
    Rung("loss_scale", scales, error=of_scale, by_step=True, absent=""),
    # Products are rounded at other places. Worst measured: 2e-15, 1e-6, 4.1e-2, 2.6e-3.
    Rung(
        "gradients",
        tensors(Recorded.GRADIENTS),
        Limits(1e-10, 1e-5, 5e-2, 2e-2),
        least=1e-6,
        loosen=for_rerouted,
        in_backward=True,
        needs_update=True,
        apart="norm_curve",
    ),
    # One sum over all gradients. Worst measured: 4e-16, 2e-7, 6e-4, 5e-5.
    Rung(
        NORMS, curve("grad_norm", 1), Limits(1e-10, 1e-5, 5e-3, 1e-3), needs_update=True, apart="norm_curve"
    ),
    # Adam turns every gradient into an update of about lr. If rounding decides a gradient's sign, weights
    # differ by 2 lr. In 16 bits relative to the movement: random signs would give 1.4, an update in the
    # opposite direction 2. Worst measured: 6e-13, 8e-4, 7.1e-1, 7.1e-2.
    Rung(
        "first_weights",
        weights(Recorded.FIRST_WEIGHTS),
        Limits(1e-10, 1e-2, 1.4, 0.7),
        since_start=True,
        needs_update=True,
        apart="later_weights",
    ),
    # Gradients and their squares: twice the error of gradients. Worst measured: 3e-15, 2e-6, 8.1e-2, 5e-3.
    Rung(
        "first_moments",
        moments,
        Limits(1e-10, 1e-5, 1e-1, 4e-2),
        least=1e-6,
        loosen=for_rerouted_squares,
        needs_update=True,
        apart="norm_curve",
        absent="the optimizer keeps no moments",
    ),
    # The formulas, from the run's own gradients. Below float64, weights have 24 bits. Worst measured: 5e-16,
    # 2.4e-7, 2.4e-7, 2.4e-7.
    Rung(
        UPDATE,
        limits=Limits(1e-10, 2e-6, 2e-6, 2e-6),
        absent="the record lacks the state before the update, such as a checkpoint's moments",
    ),
    Rung("later_weights", weights(Recorded.LATER_WEIGHTS), TRAINED, since_start=True, loosen=for_few_steps),
    Rung(
        "final_weights",
        weights(Recorded.FINAL_WEIGHTS),
        TRAINED,
        since_start=True,
        loosen=for_few_steps,
        absent="",
    ),
    Rung("loss_curve", curve("loss"), LOSSES, by_step=True),
    # Losses through gradients. Worst measured: 1e-15, 3e-3, 2e-3, 1e-4. In bfloat16 a change of 1e-7 in the
    # initial weights moves one of 200 norms by 0.6 in the same engine.
    Rung(
        "norm_curve",
        curve("grad_norm"),
        Limits(1e-10, 1e-2, 1e-1, 1e-2),
        by_step=True,
        first_steps={"bfloat16": 20},
        loosen=for_few_tokens,
    ),
    # Each rerouted token reroutes more. In 16 bits a change of 1e-7 in the initial weights moves 0.4 of a
    # block's tokens in bfloat16 and 0.2 in float16 within 20 steps, and 0.003 within 4.
    Rung(
        "tokens_per_expert",
        tokens,
        Limits(0.0, 1e-3, 5e-2, 5e-3),
        of_counts,
        by_step=True,
        first_steps={"bfloat16": 4, "float16": 4},
        loosen=for_choices,
        absent="",
    ),
    Rung("evaluations", evaluations, LOSSES, by_step=True, absent=""),
    # Settings as observed in the program. Exact.
    Rung(STRATEGY, absent=""),
)
NAMED = {rung.name: rung for rung in RUNGS}
