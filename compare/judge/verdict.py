"""The verdict over two runs: a loop that climbs the ladder (`compare.judge.rungs`).

Two wrong runs can agree. So each run is also judged alone (`compare.judge.alone`): against its request, the
seed, and the optimizer's formulas. A rung fails if the two runs differ or if one of them failed alone.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from compare.contract.record import Record
from compare.contract.request import Rung as Recorded
from compare.judge.alone import REQUEST, STRATEGY, Judged
from compare.judge.errors import Found, largest
from compare.judge.readings import Values, weights
from compare.judge.rounding import coarser
from compare.judge.rungs import BATCH, NAMED, RUNGS, Rung
from compare.judge.trace import Difference
from compare.spec.experiment import SAME_NUMBERS, differing_keys

SAME = ("model.", "data.", "optimizer.", "train.", "precision.dtype")
"""Settings in which two compared runs may not differ. Layouts and other precision settings may."""
OVERFLOWED = "the first step overflowed and was skipped: lower precision.loss_scale to compare it"
TRAINED = ("later_weights", "final_weights", "loss_curve", "norm_curve", "evaluations")
"""Rungs whose errors grow over the steps of a training. A large learning rate amplifies rounding most."""
TRACED = ("routing", "loss", "later_routing", "gradients")
"""Rungs of forward and backward, whose failure a trace explains."""
UNASKED = "it was not asked for"
OTHER_CORPUS = "the two runs read different training tokens"


class RungResult(Struct, frozen=True, kw_only=True):
    """One rung that was compared."""

    rung: str
    error: float
    """Largest relative error; infinite if names or shapes differ, or a value is not finite."""
    tolerance: float
    worst: str
    """Place of the largest error; if the error is infinite, a description of the fault."""
    first: str = ""
    """The wrong gradient that backward reaches first, at the rung of gradients."""

    @property
    def passed(self) -> bool:
        """True if the error is within the tolerance. NaN is not."""
        return self.error <= self.tolerance


class Verdict(Struct, frozen=True, kw_only=True):
    """Comparison of a run with a reference."""

    candidate: str
    reference: str
    rungs: list[RungResult]
    skipped: dict[str, str] = msgspec.field(default_factory=dict)
    """Rungs that were not compared, with the reason."""
    uncompared: dict[str, str] = msgspec.field(default_factory=dict)
    """Settings of the layout that were not checked in one of the runs, with the reason."""
    trace: Difference | UnsetType = UNSET
    """The first place where the first step differs (`compare.judge.trace`); unset without a trace."""
    untraced: str = ""
    """The reason why a trace is missing; '' if there is one, or none was needed."""

    @property
    def failure(self) -> RungResult | None:
        """The first rung that failed."""
        return next((result for result in self.rungs if not result.passed), None)

    @property
    def passed(self) -> bool:
        """True if at least one rung was compared, and all compared rungs passed."""
        return bool(self.rungs) and self.failure is None

    def result(self, rung: str) -> RungResult | None:
        """The result of a rung; None if it was skipped."""
        return next((result for result in self.rungs if result.rung == rung), None)

    def error(self, rung: str) -> float | None:
        """The error of a rung; None if it was skipped."""
        result = self.result(rung)
        return result.error if result else None

    def sentence(self) -> str:
        """PASS, or the first failed rung with its worst place and error, and the place that a trace names."""
        bad = self.failure
        if bad is None:
            return "PASS"
        off = f"{bad.worst} is off by {bad.error:.2e} (tolerance {bad.tolerance:.0e})"
        sentence = f"FAIL at {bad.rung}: {off if math.isfinite(bad.error) else bad.worst}"
        if bad.rung == STRATEGY and len(self.rungs) > 1:
            return f"all numbers agree ({len(self.rungs) - 1} rungs); {sentence} (--numbers_only skips it)"
        if bad.first and bad.first != bad.worst and math.isfinite(bad.error):
            sentence += f"; the first in backward is {bad.first}"
        if bad.rung in TRACED and self.trace:
            sentence += f"; {self.trace.sentence()}"
        if bad.rung in TRACED and self.untraced:
            sentence += f"; not traced: {self.untraced}"
        is_exact = bad.tolerance <= NAMED[bad.rung].limits.float64
        if bad.rung in TRAINED and not is_exact and math.isfinite(bad.error):
            sentence += "; rounding grows over the steps: try --precision.dtype float64, too"
        routing = self.result("later_routing")
        return f"{sentence}; {routing.worst}" if routing and routing.error and routing != bad else sentence


def climb(
    reference: Judged,
    candidate: Judged,
    rungs: Sequence[Rung] = RUNGS,
    *,
    same_training: bool = True,
    skip: Mapping[str, str] = {},
) -> Verdict:
    """Compare a run with a reference, rung by rung. The coarser dtype of the two decides the limits.

    Args:
        rungs: rows to climb, in this order.
        same_training: fail if the requests are two trainings; False if a mistake was planted in one of them.
        skip: rungs to skip, with the reason.

    Raises RecordError: a file of tensors cannot be read.
    """
    records = reference.record, candidate.record
    dtype, results, skipped = coarser(*records), [], {}
    corpora = {run.manifest.corpus_sha256 for run in records}
    others = {REQUEST: _other_training(*records), BATCH: OTHER_CORPUS if len(corpora) > 1 else ""}
    resumes = [run.request.resume for run in records if run.request and run.request.resume]
    is_apart = len(resumes) == 2 and resumes[0].checkpoint != resumes[1].checkpoint
    for rung in rungs:
        first = rung.first_steps.get(dtype)
        runs = [replace(run, steps=run.steps[:first]) for run in records]
        overflowed = rung.needs_update and all(run.steps[0].skipped for run in runs)
        why, found = OVERFLOWED if overflowed else skip.get(rung.name, ""), list[Found]()
        if not why:
            if own := candidate.alone.own.get(rung.name):
                found.append(own)
            if own := reference.alone.own.get(rung.name):
                found.append((own[0], own[1] and f"the reference: {own[1]}"))
            if same_training and (words := others.get(rung.name)):
                found.append((math.inf, words))
            if any(values := [rung.read(run) for run in runs]):
                moves = rung.since_start and dtype != "float64"
                begin = weights(Recorded.INITIAL_WEIGHTS)(runs[0]) if moves else {}
                found += errors_by_place(rung, *values, begin)
        if found:
            error, worst = max(found, key=lambda one: one[0])
            if len(runs[1].steps) < len(candidate.record.steps):
                worst += f" (only the first {first} steps were compared)"
            row = NAMED[rung.apart] if is_apart and rung.apart else rung
            limit = row.loosen(getattr(row.limits, dtype), *runs, dtype)
            error = error if math.isfinite(error) else math.inf
            first_wrong = first_in_backward(found, limit) if rung.in_backward else ""
            results.append(
                RungResult(rung=rung.name, error=error, tolerance=limit, worst=worst, first=first_wrong)
            )
        elif why or rung.absent:
            request = candidate.record.request
            skipped[rung.name] = why or (rung.absent if request and request.ladder else UNASKED)
    uncompared = reference.alone.uncompared | candidate.alone.uncompared
    if STRATEGY in skip:
        uncompared = {"the strategy": skip[STRATEGY]}
    return Verdict(
        candidate=candidate.name,
        reference=reference.name,
        rungs=results,
        skipped=skipped,
        uncompared=uncompared,
    )


def errors_by_place(
    rung: Rung, reference: Values, candidate: Values, begin: Mapping[str, np.ndarray] = {}
) -> Iterator[Found]:
    """The error at each place, or infinity with the fault. One place is in memory at a time."""
    if odd := sorted(reference.keys() ^ candidate.keys()):
        yield math.inf, f"{odd[0]} is in only one of the two"
        return
    scales = _scales(rung, reference)
    for place in reference:
        value, expected = candidate[place], reference[place]
        if value.shape != expected.shape:
            yield math.inf, f"{place} has shape {value.shape} instead of {expected.shape}"
            continue
        least = {"least": scales[_kind(place)]} if scales else {}
        yield rung.error(place, value, expected, begin.get(place), **least)


def first_in_backward(errors: Sequence[Found], limit: float) -> str:
    """The wrong gradient that backward reaches first, from errors in the order of forward; '' if none is.

    The mistake is there, or between there and the layer behind. All other errors may follow from it. The
    table of tokens is read at both ends.
    """
    wrong = [place for error, place in errors if error > limit and not place.startswith("embedding.")]
    return wrong[-1] if wrong else ""


def _scales(rung: Rung, reference: Values) -> dict[str, float]:
    """The least divisor of an error by kind of tensor. A second moment is a square."""
    scales: dict[str, float] = {}
    for place in reference if rung.least else ():
        kind = _kind(place)
        least = rung.least ** (2 if kind == "v" else 1) * largest(reference[place])
        scales[kind] = max(scales.get(kind, 0.0), least)
    return scales


def _kind(place: str) -> str:
    """The moment in `m of blocks.0.mlp.up.weight`; '' for a gradient."""
    moment, is_moment, _ = place.partition(" of ")
    return moment if is_moment else ""


def _other_training(reference: Record, candidate: Record) -> str:
    """Differences of two requests that make the runs two trainings; "" if there are none."""
    if not (reference.request and candidate.request):
        return ""
    keys = differing_keys(candidate.request.experiment, reference.request.experiment)
    odd = [key for key in keys if key.startswith(SAME) and not key.startswith(SAME_NUMBERS)]
    return f"the runs are different trainings: {'; '.join(odd[:2])}" if odd else ""
