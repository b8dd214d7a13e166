"""Two finished runs of any settings held against each other: what was asked, what came out, what it cost.

The ladder proves that runs of one training agree (`judge.ladder`). Here the trainings may be two: each rung
that both have is compared, over the steps that both made.
"""

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from compare.contract.communication import summed
from compare.contract.record import Record, read_tensors
from compare.contract.request import UPDATES, Rung
from compare.judge.ladder import Verdict, compare_rungs
from compare.judge.metrics import METRICS, figures
from compare.judge.rungs import COMPARE, compare_steps, compare_tensors, dtypes_of
from compare.judge.tolerances import Tolerance, tolerances_for
from compare.numerics.parameters import storage_dtype
from compare.system.tensors import RecordError

RATES = "lr_curve"
PRECISIONS = ("float64", "float32", "float16", "bfloat16")
"""From the finest: two runs are held to the tolerances of the coarser."""
_BETWEEN = {rung: compare for rung, compare in COMPARE.items() if rung not in ("updates", "strategy")} | {
    "initial_weights": lambda *runs: compare_tensors(*runs, Rung.INITIAL_WEIGHTS),
    "grad_norm": lambda *runs: compare_steps(*runs, "grad_norm", first=1),
    RATES: lambda *runs: compare_steps(*runs, "lr"),
}
"""Comparisons that hold no run to its request, its seed or its own gradients."""
_TENSORS = {rung.value: (rung,) for rung in Rung} | {"first_moments": UPDATES[0][1:]}
_ROUNDED = Tolerance(1e-7)  # drawn in float64, and kept in float32 by one of the runs: half a unit, 6e-8
_OF_NO_NUMBER = ("timeout_s", "cache_dir", "later_step")


class Difference(Struct, frozen=True, kw_only=True):
    """Two records held against each other."""

    settings: dict[str, tuple[str, str]]
    """What was asked of both, and on which versions they ran, where these differ."""
    verdict: Verdict
    """Rung by rung, relative to the first; `skipped` says why a rung was not compared."""
    steps: int
    """That both made, and over which curves were compared."""
    costs: dict[str, tuple[float, float]]
    """Figures of both by label, and the bytes of each collective; they decide nothing."""


def difference(a: Record, b: Record, *, names: tuple[str, str]) -> Difference:
    """Hold two records against each other, relative to the first. Raises RecordError: they cannot be."""
    pair = [_of_steps_in(b, a), _of_steps_in(a, b)]
    steps = len(pair[0].steps)
    if not steps:
        raise RecordError(f"{names[0]} and {names[1]} have no step in common: there is nothing to compare")
    coarser = max(dtypes_of(a, b), key=PRECISIONS.index)
    tolerances = tolerances_for(coarser, steps=steps) | {RATES: Tolerance(0.0)}  # a formula of the step alone
    if len({storage_dtype(run.manifest.experiment) for run in pair}) > 1:
        tolerances |= {"initial_weights": _ROUNDED}
    rungs, skipped = compare_rungs(*pair, tolerances, _BETWEEN, lambda rung: _why_not(rung, a, b))
    verdict = Verdict(reference=names[0], candidate=names[1], rungs=rungs, skipped=skipped)
    return Difference(settings=_changes(a, b), verdict=verdict, steps=steps, costs=_costs(a, b))


def _of_steps_in(other: Record, run: Record) -> Record:
    """The record with those of its steps and evaluations that another has, too."""
    steps, after = ({one.step for one in of} for of in (other.steps, other.evaluations))
    return replace(
        run,
        steps=[step for step in run.steps if step.step in steps],
        evaluations=[found for found in run.evaluations if found.step in after],
    )


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
    if rung == Rung.ROUTING and not any(run.steps[0].tokens_per_expert for run in (a, b)):
        return ""  # no experts
    for tensors in _TENSORS.get(rung, ()):
        first, second = (
            {name: tensor.shape for name, tensor in read_tensors(run.folder, tensors).items()}
            for run in (a, b)
        )
        if not (first and second):
            lacks = " and ".join(name for name, shapes in (("A", first), ("B", second)) if not shapes)
            return f"no tensors of it in {lacks}: `shardpair run --keep_tensors` keeps them"
        if odd := sorted(name for name in first | second if first.get(name) != second.get(name)):
            return f"shapes differ: {odd[0]} {first.get(odd[0], 'none')} and {second.get(odd[0], 'none')}"
    return ""


def _changes(a: Record, b: Record) -> dict[str, tuple[str, str]]:
    """Fields of the request, and the circumstances, that differ."""
    first, second = _fields(a), _fields(b)
    if first["corpus_sha256"] == second["corpus_sha256"]:  # another copy of the same text
        second["experiment.data.source"] = first.get("experiment.data.source", "")
    both = {field: (first.get(field, "-"), second.get(field, "-")) for field in first | second}
    return {field.removeprefix("experiment."): pair for field, pair in both.items() if pair[0] != pair[1]}


def _fields(run: Record) -> dict[str, str]:
    manifest, asked = run.manifest, msgspec.to_builtins(run.request) if run.request else {}
    found = {name: value for name, value in asked.items() if name not in _OF_NO_NUMBER}
    found |= {name: getattr(manifest, name) for name in ("device_kind", "threads")}
    found["corpus_sha256"] = manifest.corpus_sha256[:12]
    return _flat(found | {f"version of {package}": number for package, number in manifest.versions.items()})


def _flat(value: object, prefix: str = "") -> dict[str, str]:
    if not isinstance(value, dict):
        return {prefix.removesuffix("."): str(value)}
    return {
        key: text for name, inner in value.items() for key, text in _flat(inner, f"{prefix}{name}.").items()
    }


def _costs(a: Record, b: Record) -> dict[str, tuple[float, float]]:
    """The figures of the table of costs, then the bytes of each collective in a step."""
    of_a, of_b = figures(a), figures(b)
    both = [metric for metric in METRICS if metric.form and metric.key in of_a.keys() & of_b.keys()]
    costs = {metric.label: (of_a[metric.key], of_b[metric.key]) for metric in both}
    sent_a, sent_b = (
        {" ".join(f"{row.kind} {row.axis} {row.purpose} (bytes)".split()): row.bytes for row in rows}
        for rows in (summed(run.ledger.rows) for run in (a, b))
    )
    return costs | {name: (sent_a.get(name, 0), sent_b.get(name, 0)) for name in sorted(sent_a | sent_b)}
