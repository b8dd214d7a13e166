"""The numerics ladder: does one run compute the same thing as another, and if not, where does it part?

First both must be what was asked for (`judge.acceptance`): two runs that stop early agree. Then each rung
(`judge.rungs`) compares what arises one after the other in training. The first that fails names the kind of
mistake: a wrong mean shows in the gradients, a wrong decay in the first weights, a wrong beta2 in the moments
and nowhere before. Gradients come before anything that an optimizer did with them: Adam and clipping hide
their scale. Last comes what no number shows: whether the work was spread, ordered and kept as asked
(`judge.strategy`).

The error of a tensor is relative to the largest entry of that tensor; entry by entry would divide by
gradients that are zero in exact arithmetic, such as those of the key bias.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec import Struct

from compare.contract.record import Record
from compare.judge.acceptance import differing_keys, objections
from compare.judge.rungs import (
    ABSENT,
    COMPARE,
    OF_FIRST_STEP,
    SOME,
    Compare,
    resumed_from_different_checkpoints,
    shortened,
)
from compare.judge.strategy import strategy_of
from compare.judge.tolerances import Tolerance, flips_of_rounding, loss_rounding, tolerances_for

REQUEST = "request"
LADDER = (REQUEST, *COMPARE)
OF_TRAINING = ("model.", "data.", "optimizer.", "train.")
"""Sections in which two runs may not differ. How work is spread, and how exact it is, may."""
OVERFLOWED = "the first step overflowed and was skipped: lower precision.loss_scale to compare it"


class RungResult(Struct, frozen=True, kw_only=True):
    """One rung that was compared."""

    rung: str
    error: float
    """Worst relative error; infinite where there is none to give: names differ, a value is not finite."""
    tolerance: float
    worst: str
    """Place of the worst error: a canonical parameter name, a step, ...; or the fault in words."""

    @property
    def passed(self) -> bool:
        """True if the error is within the tolerance. A NaN is not."""
        return self.error <= self.tolerance


class Verdict(Struct, frozen=True, kw_only=True):
    """One run held against another."""

    candidate: str
    reference: str
    rungs: list[RungResult]
    skipped: dict[str, str] = msgspec.field(default_factory=dict)
    """Rungs that could not be compared, and why."""

    @property
    def failure(self) -> RungResult | None:
        """The first rung that failed."""
        return next((result for result in self.rungs if not result.passed), None)

    @property
    def passed(self) -> bool:
        """True if every rung that was compared held, and at least one was."""
        return bool(self.rungs) and self.failure is None

    def error(self, rung: str) -> float | None:
        """The worst error of one rung; None if it was skipped."""
        return next((result.error for result in self.rungs if result.rung == rung), None)

    def sentence(self) -> str:
        """PASS, or the first rung that failed with the worst place and its error."""
        bad = self.failure
        if bad is None:
            return "PASS"
        flips = [f"; {one.worst}" for one in self.rungs if one.rung == "routing" and one.error and one != bad]
        if not math.isfinite(bad.error):
            return f"FAIL at {bad.rung}: {bad.worst}{''.join(flips)}"
        off = f"{bad.worst} is off by {bad.error:.2e} (tolerance {bad.tolerance:.0e})"
        return f"FAIL at {bad.rung}: {off}{''.join(flips)}"


def objections_by_itself(record: Record) -> list[str]:
    """What a run did otherwise than asked, as far as it shows without another. Raises RecordError."""
    return [*objections(record), *strategy_of(record).objections]


def climb(
    reference: Record,
    candidate: Record,
    *,
    reference_name: str = "",
    name: str = "",
    same_training: bool = True,
) -> Verdict:
    """Hold a run against a reference, rung by rung; the run's precision decides the tolerances.

    Unless `same_training`, they may have been asked for two: a mistake was planted in the spec of one.
    Names are engines by default. Raises RecordError: a file of tensors is garbled.
    """
    reference_name = reference_name or reference.manifest.engine
    name = name or candidate.manifest.engine
    apart = resumed_from_different_checkpoints(reference, candidate)
    dtype = candidate.manifest.experiment.precision.dtype
    seen = {"rounding": loss_rounding(reference), "flips": flips_of_rounding(reference)}
    tolerances = tolerances_for(dtype, steps=len(candidate.steps), apart=apart, **seen)
    runs = [(reference_name, reference), (name, candidate)]
    request = _compare_requests(runs, tolerances[REQUEST], same_training=same_training)
    results, skipped = compare_rungs(reference, candidate, tolerances)
    return Verdict(candidate=name, reference=reference_name, rungs=[request, *results], skipped=skipped)


def compare_rungs(
    reference: Record,
    candidate: Record,
    tolerances: Mapping[str, Tolerance],
    comparisons: Mapping[str, Compare] = COMPARE,
    why_not: Callable[[str], str] = lambda rung: "",
) -> tuple[list[RungResult], dict[str, str]]:
    """The rungs of two runs that can be compared, and why others cannot; `why_not` may rule one out."""
    results, skipped, request = [], {}, candidate.request
    for rung, compare in comparisons.items():
        tolerance = tolerances[rung]
        few = [shortened(run, tolerance.steps) for run in (reference, candidate)]
        if why := why_not(rung):
            skipped[rung] = why
        elif rung in OF_FIRST_STEP and reference.steps[0].skipped and candidate.steps[0].skipped:
            skipped[rung] = OVERFLOWED
        elif found := compare(*few):
            error, worst = found
            if len(few[1].steps) < len(candidate.steps):
                worst += f", of the first {len(few[1].steps)} steps, as no later one was compared"
            results.append(result_of(rung, error, worst, tolerance))
        elif rung not in SOME:
            asked = request and request.ladder
            skipped[rung] = ABSENT.get(rung, "the runs did not leave it") if asked else "it was not asked for"
    return results, skipped


def result_of(rung: str, error: float, worst: str, tolerance: Tolerance) -> RungResult:
    """A rung's result; an error that is not finite counts as infinite."""
    error = error if math.isfinite(error) else math.inf
    return RungResult(rung=rung, error=error, tolerance=tolerance.limit, worst=worst)


def _compare_requests(
    runs: Sequence[tuple[str, Record]], tolerance: Tolerance, *, same_training: bool
) -> RungResult:
    """Both runs against what was asked of them, and of them together."""
    wrong = [f"{name}: {objection}" for name, run in runs for objection in objections(run)]
    reference, candidate = (run.manifest.experiment.precision.dtype for _, run in runs)
    if reference != candidate:
        wrong.append(f"{candidate} cannot be held against a reference in {reference}")
    requests = [run.request for _, run in runs if run.request]
    if same_training and len(requests) == 2:
        before, after = (request.experiment for request in requests)
        differ = (key for key in differing_keys(after, before) if key.startswith(OF_TRAINING))
        wrong += [f"{key} was asked for: the two are no one training" for key in differ]
    return result_of(REQUEST, math.inf if wrong else 0.0, "; ".join(wrong[:2]), tolerance)
