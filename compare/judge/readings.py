"""Readings of a record for the rungs of the ladder, and the errors between two readings."""

import math
from collections.abc import Callable, Mapping

import numpy as np

from compare.contract.record import Record, read_tensors
from compare.contract.request import MOMENTS, UPDATES
from compare.contract.request import Rung as Recorded
from compare.judge.errors import Found, relative_error, without_key_bias
from compare.numerics.boxes import Weights
from compare.numerics.data import SPLITS

Values = Mapping[str, np.ndarray]
"""Arrays that a rung reads of a run, by place: a parameter's name, or a step."""

# Readers: arrays of one run, by place; {} if the run has none.


def tensors(recorded: Recorded) -> Callable[[Record], Values]:
    """Read recorded tensors, one at a time when they are compared."""
    return lambda run: read_tensors(run.folder, recorded)


def weights(recorded: Recorded) -> Callable[[Record], Values]:
    """Read recorded weights without key biases."""

    def read(run: Record) -> Values:
        found, model = read_tensors(run.folder, recorded), run.manifest.experiment.model
        return Weights(found, lambda name: without_key_bias(name, found[name], model))

    return read


def moments(run: Record) -> Values:
    """Read the moments after the first update."""
    found = {MOMENTS[rung]: read_tensors(run.folder, rung) for rung in UPDATES[0][1:]}
    places = {f"{moment} of {name}": (moment, name) for moment, named in found.items() for name in named}
    return Weights(places, lambda place: found[places[place][0]][places[place][1]])


def curve(field: str, first: int | None = None) -> Callable[[Record], Values]:
    """Read a field of all steps, or of the first ones."""
    return lambda run: {f"{field} of step {s.step}": np.array(getattr(s, field)) for s in run.steps[:first]}


def evaluations(run: Record) -> Values:
    return {f"{x} loss after step {e.step}": np.array(getattr(e, x)) for e in run.evaluations for x in SPLITS}


def scales(run: Record) -> Values:
    """Read the loss scale of each step in float16, and whether the step was skipped."""
    return {f"step {s.step}": np.array([s.loss_scale, s.skipped]) for s in run.steps if s.loss_scale}


def experts(blocks: int | None = None) -> Callable[[Record], Values]:
    """Read the experts that each token of the first step chose (A, L, B, T, k), in some blocks or all."""

    def read(run: Record) -> Values:
        found = read_tensors(run.folder, Recorded.ROUTING)
        return Weights(found, lambda name: found[name][:blocks].swapaxes(0, 1))

    return read


def tokens(run: Record) -> Values:
    """Read how many tokens each expert of a block had in each step (E,)."""
    return {
        f"block {block} in step {s.step}": np.array(counts)
        for s in run.steps
        for block, counts in enumerate(s.tokens_per_expert or ())
    }


# Errors at a place, from the arrays of the candidate, of the reference, and before training.


def of_tensor(
    place: str, value: np.ndarray, reference: np.ndarray, begin: np.ndarray | None, least: float = 0.0
) -> Found:
    error = relative_error(value, reference, begin, least=least)
    if math.isfinite(error):
        return error, place
    return error, f"{place}{'' if np.isfinite(reference).all() else ' of the reference'} is not finite"


def of_scale(place: str, value: np.ndarray, reference: np.ndarray, begin: None) -> Found:
    if (value == reference).all():
        return 0.0, place
    done = (f"{'skipped' if skipped else 'made'} at scale {scale:g}" for scale, skipped in (value, reference))
    found = f"{place} was {' instead of '.join(done)}"
    if value[0] != reference[0]:
        return math.inf, found
    lower = max(value[0] / 64, 1.0)
    edge = "a gradient near float16's largest number may overflow in one run only"
    return math.inf, f"{found}: {edge}; compare with --precision.loss_scale {lower:g}"


def of_choices(place: str, value: np.ndarray, reference: np.ndarray, begin: None) -> Found:
    """Share of the experts that were chosen instead of others.

    Routing is discontinuous: if two router logits nearly tie, rounding can choose either. The runs differ
    from that token on. In float64 no two logits are that near.
    """
    is_new, is_gone = (
        (a[..., :, None] != b[..., None, :]).all(-1) for a, b in ((value, reference), (reference, value))
    )
    if not is_new.any():
        return 0.0, ""
    first = tuple(np.argwhere(is_new.any(-1))[0])
    dims = zip(("pass", "block", "sequence", "position"), first, strict=True)
    where = ", ".join(f"{dim} {number}" for dim, number in dims)
    new, gone = value[first][is_new[first]][0], reference[first][is_gone[first]][0]
    flips = f"{is_new.sum():,} of {is_new.size:,} choices, the first in {where}"
    return float(is_new.mean()), f"{flips}: expert {new} instead of {gone}"


def of_counts(place: str, value: np.ndarray, reference: np.ndarray, begin: None) -> Found:
    """Share of a block's tokens that went to other experts."""
    return float(np.abs(value - reference).sum() / 2 / reference.sum()), place
