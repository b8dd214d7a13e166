"""Two finished runs of any settings held against each other: what was asked, what came out, what it cost.

The ladder proves that runs of one training agree (`judge.ladder`). Here the trainings may be two: each rung
that both have is compared, over the steps that both made, and the others say why they are not.
"""

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from compare.contract.communication import summed
from compare.contract.record import Record, read_tensors
from compare.contract.request import MOMENTS, Rung
from compare.host.tensors import RecordError
from compare.judge.ladder import OVERFLOWED, RungResult, Verdict, result_of
from compare.judge.metrics import METRICS, figures
from compare.judge.rungs import (
    COMPARE,
    OF_FIRST_STEP,
    compare_steps,
    compare_tensors,
    first_was_skipped,
    shortened,
)
from compare.judge.tolerances import Tolerance, tolerances_for
from compare.numerics.parameters import storage_dtype

PRECISIONS = ("float64", "float32", "float16", "bfloat16")
"""From the finest: two runs are held to the tolerances of the coarser."""
OF_ONE_RUN = ("first_update", "strategy")
"""Rungs that hold a run to its own request: nothing is compared between the two."""
_BETWEEN = COMPARE | {
    "initial_weights": lambda *runs: compare_tensors(*runs, Rung.INITIAL_WEIGHTS),
    "grad_norm": lambda *runs: compare_steps(*runs, "grad_norm", first=1),
}
"""Comparisons that hold no run to its seed, or to its gradients."""
_TENSORS = {rung.value: (rung,) for rung in Rung} | {"first_moments": tuple(MOMENTS)}
RATES = "lr_curve"
_SCHEDULED = Tolerance(0.0, "a formula of the step alone")
_ROUNDED = Tolerance(1e-7, "drawn in float64, and kept in float32 by one of the runs: half a unit, 6e-8")
_OF_NO_NUMBER = ("timeout_s", "cache_dir", "later_step")


class Change(Struct, frozen=True, kw_only=True):
    """A setting that is another one in the second run."""

    field: str
    a: str
    b: str


class Difference(Struct, frozen=True, kw_only=True):
    """Two records held against each other."""

    settings: list[Change]
    """What was asked, and on which versions it ran, where these differ."""
    verdict: Verdict
    """Rung by rung, relative to the first; `skipped` says why a rung was not compared."""
    steps: int
    """That both made, and over which curves were compared."""
    costs: dict[str, tuple[float, float]]
    """Figures of both by label, and the bytes of each collective; they decide nothing."""

    @property
    def alike(self) -> bool:
        """True if every number that was compared is within the tolerance."""
        return self.verdict.passed


def difference(a: Record, b: Record, *, names: tuple[str, str]) -> Difference:
    """Hold two records against each other, relative to the first. Raises RecordError: they cannot be."""
    pair = common(a, b)
    steps = len(pair[0].steps)
    if not steps:
        raise RecordError(f"{names[0]} and {names[1]} have no step in common: there is nothing to compare")
    try:
        rungs, skipped = _rungs(a, b, pair)
        verdict = Verdict(reference=names[0], candidate=names[1], rungs=rungs, skipped=skipped)
        return Difference(settings=_changes(a, b), verdict=verdict, steps=steps, costs=_costs(a, b))
    except (LookupError, ArithmeticError) as error:
        why = f"{type(error).__name__}: {error}"
        raise RecordError(f"{names[0]} and {names[1]} cannot be held against each other ({why})") from error


def _rungs(a: Record, b: Record, pair: tuple[Record, Record]) -> tuple[list[RungResult], dict[str, str]]:
    """Of the steps that both have: every rung that can be compared, and why others cannot."""
    experiments = [run.manifest.experiment for run in pair]
    dtypes = {experiment.precision.dtype for experiment in experiments}
    dtype = max(dtypes, key=PRECISIONS.index)
    tolerances = tolerances_for(dtype, steps=len(pair[0].steps))
    if len({storage_dtype(experiment) for experiment in experiments}) > 1:
        tolerances |= {"initial_weights": _ROUNDED}
    results, skipped = [], {}
    for rung, compare in _BETWEEN.items():
        if rung in OF_ONE_RUN or (rung == "loss_scale" and len(dtypes) > 1):
            continue
        if why := _why_not(rung, a, b):
            skipped[rung] = why
            continue
        tolerance = tolerances[rung]
        if found := compare(*(shortened(_as(dtype, run), tolerance.steps) for run in pair)):
            results.append(result_of(rung, *found, tolerance))
    return [*results, result_of(RATES, *compare_steps(*pair, "lr"), _SCHEDULED)], skipped


def common(a: Record, b: Record) -> tuple[Record, Record]:
    """Both records with the steps, and the evaluations, that both have."""
    steps = {step.step for step in a.steps} & {step.step for step in b.steps}
    after = {found.step for found in a.evaluations} & {found.step for found in b.evaluations}
    first, second = (
        replace(
            run,
            steps=[step for step in run.steps if step.step in steps],
            evaluations=[found for found in run.evaluations if found.step in after],
        )
        for run in (a, b)
    )
    return first, second


def _as(dtype: str, run: Record) -> Record:
    """The record judged in the coarser dtype of the two."""
    experiment = run.manifest.experiment
    precision = replace(experiment.precision, dtype=dtype)
    return replace(run, manifest=replace(run.manifest, experiment=replace(experiment, precision=precision)))


def _why_not(rung: str, a: Record, b: Record) -> str:
    """Why a rung cannot be compared; '' if it can."""
    begins = {run.steps[0].step for run in (a, b)}
    if rung in (*_TENSORS, "grad_norm") and len(begins) > 1:
        return f"the runs begin at steps {' and '.join(map(str, sorted(begins)))}"
    if rung == "final_weights" and len(a.steps) != len(b.steps):
        return f"the runs have {len(a.steps)} and {len(b.steps)} steps"
    later = [run.request.later_step for run in (a, b) if run.request]
    if rung == "later_weights" and len(set(later)) > 1:
        return f"they were kept after {' and '.join(map(str, later))} steps"
    if rung in OF_FIRST_STEP and first_was_skipped(a, b):
        return OVERFLOWED
    first, second = (
        {
            name: tensor.shape
            for tensors in _TENSORS.get(rung, ())
            for name, tensor in read_tensors(run.folder, tensors).items()
        }
        for run in (a, b)
    )
    if rung in _TENSORS and not (first and second):
        lacks = " and ".join(name for name, shapes in (("A", first), ("B", second)) if not shapes)
        return f"no tensors of it in {lacks}: `shardpair run --keep_tensors` keeps them"
    if odd := sorted(name for name in first | second if first.get(name) != second.get(name)):
        return f"shapes differ: {odd[0]} {first.get(odd[0], 'none')} and {second.get(odd[0], 'none')}"
    return ""


def _changes(a: Record, b: Record) -> list[Change]:
    """Fields of the request, and the circumstances, that differ."""
    first, second = _fields(a), _fields(b)
    if first["corpus_sha256"] == second["corpus_sha256"]:  # another copy of the same text
        second["experiment.data.source"] = first.get("experiment.data.source", "")
    return [
        Change(field=field.removeprefix("experiment."), a=first.get(field, "-"), b=second.get(field, "-"))
        for field in dict.fromkeys([*first, *second])
        if first.get(field) != second.get(field)
    ]


def _fields(run: Record) -> dict[str, str]:
    manifest = run.manifest
    asked = _flat(msgspec.to_builtins(run.request)) if run.request else {}
    ran = {
        "corpus_sha256": manifest.corpus_sha256[:12],
        "device_kind": manifest.device_kind,
        "threads": manifest.threads,
        **{f"version of {package}": version for package, version in manifest.versions.items()},
    }
    return {name: value for name, value in asked.items() if name not in _OF_NO_NUMBER} | ran


def _flat(value: object, prefix: str = "") -> dict[str, str]:
    if not isinstance(value, dict):
        return {prefix.removesuffix("."): str(value)}
    return {
        key: text for name, inner in value.items() for key, text in _flat(inner, f"{prefix}{name}.").items()
    }


def _costs(a: Record, b: Record) -> dict[str, tuple[float, float]]:
    """The figures of the table of costs, then the bytes of each collective in a step."""
    first, second = figures(a), figures(b)
    costs = {
        metric.label: (first[metric.key], second[metric.key])
        for metric in METRICS
        if metric.form and metric.key in first and metric.key in second
    }
    sent = [
        {" ".join(f"{row.kind} {row.axis} {row.purpose} (bytes)".split()): row.bytes for row in rows}
        for rows in (summed(run.ledger.rows) for run in (a, b))
    ]
    return costs | {name: (sent[0].get(name, 0), sent[1].get(name, 0)) for name in sorted(sent[0] | sent[1])}
