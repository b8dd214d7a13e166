"""Two finished runs of any settings held against each other: what was asked, what came out, what it cost.

The ladder proves that runs of one training agree (`judge.ladder`). Here the trainings may be two: each rung
that both have is compared, over the steps that both made, and the others say why they are not.
"""

import math

from msgspec import Struct
from msgspec.structs import replace

from compare.contract.record import Record, read_tensors
from compare.contract.request import Rung
from compare.host.tensors import RecordError, Tensors
from compare.judge.ladder import LADDER, LOSS_SCALE, OF_FIRST_STEP, RungResult, Verdict
from compare.judge.run_changes import Change, CostChange, changed_costs, changed_settings
from compare.judge.rungs import COMPARE, first_was_skipped, shortened
from compare.judge.tensor_errors import worst_tensor
from compare.judge.tolerances import Tolerance, tolerances_for
from compare.numerics.optimizer import moment_names
from compare.numerics.parameters import storage_dtype

PRECISIONS = ("float64", "float32", "float16", "bfloat16")
"""From the finest: two runs are held to the tolerances of the coarser."""
OF_ONE_RUN = ("request", "first_update", "strategy")
"""Rungs that hold a run to its own request: nothing is compared between the two."""
RATES = "lr_curve"
_MOMENTS = {"m": Rung.FIRST_M, "v": Rung.FIRST_V}
_TENSORS = {
    "batch": Rung.BATCH,
    "initial_weights": Rung.INITIAL_WEIGHTS,
    "gradients": Rung.GRADIENTS,
    "first_weights": Rung.FIRST_WEIGHTS,
    "later_weights": Rung.LATER_WEIGHTS,
    "final_weights": Rung.FINAL_WEIGHTS,
}
_SCHEDULED = Tolerance(0.0, "a formula of the step alone")
_ROUNDED = Tolerance(1e-7, "drawn in float64, and kept in float32 by one of the runs: half a unit, 6e-8")


class Difference(Struct, frozen=True, kw_only=True):
    """Two records held against each other."""

    settings: list[Change]
    """What was asked, and on which versions it ran, where these differ."""
    verdict: Verdict
    """Rung by rung, relative to the first; `skipped` says why a rung was not compared."""
    steps: int
    """That both made, and over which curves were compared."""
    costs: list[CostChange]

    @property
    def alike(self) -> bool:
        """True if every number that was compared is within the tolerance."""
        return self.verdict.passed


def difference(a: Record, b: Record, *, names: tuple[str, str]) -> Difference:
    """Hold two records against each other.

    Args:
        a: the first; errors are relative to it.
        b: the second.
        names: of both, for the verdict.

    Raises:
        RecordError: they have no step in common, a file of tensors is garbled, or figures cannot be.
    """
    try:
        verdict, steps = _verdict(a, b, names)
        return Difference(
            settings=list(changed_settings(a, b)), verdict=verdict, steps=steps, costs=changed_costs(a, b)
        )
    except (LookupError, ArithmeticError, ValueError) as error:
        if isinstance(error, RecordError):
            raise
        why = f"{type(error).__name__}: {error}"
        raise RecordError(f"{names[0]} and {names[1]} cannot be held against each other ({why})") from error


def _verdict(a: Record, b: Record, names: tuple[str, str]) -> tuple[Verdict, int]:
    pair = common(a, b)
    steps = len(pair[0].steps)
    if not steps:
        raise RecordError(f"{names[0]} and {names[1]} have no step in common: there is nothing to compare")
    dtype = max((run.manifest.experiment.precision.dtype for run in pair), key=PRECISIONS.index)
    tolerances = tolerances_for(dtype, steps=steps)
    results, skipped = [_rates(*pair)], {}
    for rung in LADDER:
        if rung in OF_ONE_RUN or (rung == LOSS_SCALE and not _scaled(*pair)):
            continue
        if why := _why_not(rung, a, b):
            skipped[rung] = why
        elif rung == "initial_weights":
            results.append(_initial_weights(*pair))
        elif rung == "grad_norm":  # of the first step; the ladder's own holds each to its gradients, too
            found = COMPARE["norm_curve"](*(shortened(run, 1) for run in pair))
            results.append(_result(rung, *(found or (0.0, "")), tolerances[rung]))
        elif found := COMPARE[rung](*(shortened(_as(dtype, run), tolerances[rung].steps) for run in pair)):
            results.append(_result(rung, *found, tolerances[rung]))
    results.sort(key=lambda result: [*LADDER, RATES].index(result.rung))
    return Verdict(reference=names[0], candidate=names[1], rungs=results, skipped=skipped), steps


def common(a: Record, b: Record) -> tuple[Record, Record]:
    """Both records with the steps, and the evaluations, that both have."""
    steps = {step.step for step in a.steps} & {step.step for step in b.steps}
    after = {one.step for one in a.evaluations} & {one.step for one in b.evaluations}
    first, second = (
        replace(
            run,
            steps=[step for step in run.steps if step.step in steps],
            evaluations=[one for one in run.evaluations if one.step in after],
        )
        for run in (a, b)
    )
    return first, second


def _as(dtype: str, run: Record) -> Record:
    """The record judged in the coarser dtype of the two."""
    experiment = run.manifest.experiment
    precision = replace(experiment.precision, dtype=dtype)
    return replace(run, manifest=replace(run.manifest, experiment=replace(experiment, precision=precision)))


def _result(rung: str, error: float, worst: str, tolerance: Tolerance) -> RungResult:
    error = error if math.isfinite(error) else math.inf
    return RungResult(rung=rung, error=error, tolerance=tolerance.limit, worst=worst, reason=tolerance.reason)


def _initial_weights(a: Record, b: Record) -> RungResult:
    """What both began with, wherever it is from: each run's own seed or checkpoint is not asked."""
    kept = [storage_dtype(run.manifest.experiment) for run in (a, b)]
    tolerance = tolerances_for("float32")["initial_weights"] if kept[0] == kept[1] else _ROUNDED
    found = worst_tensor(*(read_tensors(run.folder, Rung.INITIAL_WEIGHTS) for run in (b, a)))
    return _result("initial_weights", *found, tolerance)


def _rates(a: Record, b: Record) -> RungResult:
    """Learning rates of the steps that both made."""
    for x, y in zip(a.steps, b.steps, strict=True):
        if x.lr != y.lr:
            off = abs(y.lr - x.lr) / abs(x.lr) if x.lr else math.inf
            return _result(RATES, off, f"lr of step {x.step}", _SCHEDULED)
    return _result(RATES, 0.0, "", _SCHEDULED)


def _scaled(a: Record, b: Record) -> bool:
    """Whether both scaled their loss."""
    return all(run.manifest.experiment.precision.dtype == "float16" for run in (a, b))


def _why_not(rung: str, a: Record, b: Record) -> str:
    """Why a rung cannot be compared; '' if it can."""
    begins = {run.steps[0].step for run in (a, b)}
    if rung in (*_TENSORS, "first_moments", "grad_norm") and len(begins) > 1:
        return f"the runs begin at steps {' and '.join(map(str, sorted(begins)))}"
    if rung == "final_weights" and len(a.steps) != len(b.steps):
        return f"the runs have {len(a.steps)} and {len(b.steps)} steps"
    if rung == "later_weights" and a.request and b.request and a.request.later_step != b.request.later_step:
        return f"they were kept after {a.request.later_step} and {b.request.later_step} steps"
    if rung in OF_FIRST_STEP and first_was_skipped(a, b):
        return "the first step overflowed in both, and was skipped"
    if rung == "first_moments":
        return _why_no_moments(a, b)
    return _why_no_tensors(_TENSORS[rung], a, b) if rung in _TENSORS else ""


def _why_no_moments(a: Record, b: Record) -> str:
    kept, others = (moment_names(run.manifest.experiment.optimizer) for run in (a, b))
    if kept != others or not kept:
        return "the optimizers keep other moments" if kept != others else "the optimizer keeps no moments"
    return next((why for name in kept if (why := _why_no_tensors(_MOMENTS[name], a, b))), "")


def _why_no_tensors(rung: Rung, a: Record, b: Record) -> str:
    kept = [read_tensors(run.folder, rung) for run in (a, b)]
    if lacks := [which for which, tensors in zip("AB", kept, strict=True) if not tensors]:
        return f"no tensors of it in {' and '.join(lacks)}: `shardpair run --keep_tensors` keeps them"
    shapes = [_shapes(tensors) for tensors in kept]
    odd = next((name for name in sorted(shapes[0]) if shapes[0][name] != shapes[1].get(name)), "")
    if shapes[0] == shapes[1]:
        return ""
    return (
        f"shapes differ: {odd} {shapes[0][odd]} and {shapes[1].get(odd, 'none')}" if odd else "names differ"
    )


def _shapes(tensors: object) -> dict[str, tuple[int, ...]]:
    return {name: tensors.shape(name) for name in tensors} if isinstance(tensors, Tensors) else {}
