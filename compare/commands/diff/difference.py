"""Comparison of two finished runs with any settings: what was asked for, the numbers, and the costs.

The ladder proves that runs of one training agree. Here the runs may be two trainings: each rung that both
runs recorded is compared, over the steps that both made.
"""

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from compare.contract.communication import summed
from compare.contract.record import Record, read_tensors
from compare.contract.request import Rung as Recorded
from compare.judge.alone import REQUEST, STRATEGY, UPDATE, Alone, Judged
from compare.judge.readings import curve
from compare.judge.rungs import RUNGS, Rung
from compare.judge.verdict import Verdict, climb
from compare.run.metrics import METRICS, figures
from compare.system.tensors import RecordError

RATES = Rung("lr_curve", curve("lr"), by_step=True)
SHARED = (*(rung for rung in RUNGS if rung.name not in (REQUEST, UPDATE, STRATEGY)), RATES)
"""Rungs that compare two runs with each other."""
NO_NUMBER = ("timeout_s", "cache_dir", "later_step")
"""Fields of a request that change no number."""


class Difference(Struct, frozen=True, kw_only=True):
    """Comparison of two records."""

    settings: dict[str, tuple[str, str]]
    """Fields of the request, and versions, that differ."""
    verdict: Verdict
    """The shared rungs, relative to the first record."""
    steps: int
    """Number of steps that both runs made."""
    costs: dict[str, tuple[float, float]]
    """Figures of both by key of METRICS, and the bytes of each collective. They do not affect the verdict."""


def difference(a: Record, b: Record, *, names: tuple[str, str]) -> Difference:
    """Compare two records, relative to the first. Raises RecordError: they have no step in common."""
    shared = [_with_steps_of(b, a), _with_steps_of(a, b)]
    if not (steps := len(shared[0].steps)):
        raise RecordError(f"{names[0]} and {names[1]} have no step in common: there is nothing to compare")
    judged = [Judged(name, run, Alone()) for name, run in zip(names, shared, strict=True)]
    skip = _incomparable(a, b)
    others = (rung for rung in SHARED if rung.name not in skip)
    skip |= {rung.name: why for rung in others if (why := _mismatch(rung, *judged))}
    verdict = climb(*judged, SHARED, skip=skip)
    return Difference(settings=_changes(a, b), verdict=verdict, steps=steps, costs=_costs(a, b))


def _with_steps_of(other: Record, run: Record) -> Record:
    """The record without steps and evaluations that another lacks."""
    steps, after = ({one.step for one in of} for of in (other.steps, other.evaluations))
    return replace(
        run,
        steps=[step for step in run.steps if step.step in steps],
        evaluations=[found for found in run.evaluations if found.step in after],
    )


def _mismatch(rung: Rung, *runs: Judged) -> str:
    """Why two runs have nothing to compare at a rung; "" if they have, or if it does not apply."""
    values = [rung.read(run.record) for run in runs]
    lacking = [run.name for run, found in zip(runs, values, strict=True) if not found]
    removed = rung.absent and not all(read_tensors(run.record.folder, Recorded.BATCH) for run in runs)
    if len(lacking) == 1 or (lacking and removed):
        have = "has" if len(lacking) == 1 else "have"
        return f"{' and '.join(lacking)} {have} no tensors of it: `shardpair run --keep_tensors` keeps them"
    shapes = [{place: found[place].shape for place in found} for found in values]
    odd = min((place for place, _ in shapes[0].items() ^ shapes[1].items()), default="")
    return odd and f"{odd} is {' and '.join(str(of.get(odd, 'missing')) for of in shapes)}"


def _incomparable(a: Record, b: Record) -> dict[str, str]:
    """Rungs at which two runs are at different points of training, with the reason."""
    begins, why = sorted({run.steps[0].step for run in (a, b)}), {}
    if len(a.steps) != len(b.steps):
        why["final_weights"] = f"the runs have {len(a.steps)} and {len(b.steps)} steps"
    later = [run.request.later_step for run in (a, b) if run.request]
    if len(set(later)) > 1:
        why["later_weights"] = f"they were recorded after {' and '.join(map(str, later))} steps"
    if len(begins) > 1:
        at = f"the runs begin at steps {' and '.join(map(str, begins))}"
        why |= {rung.name: at for rung in SHARED if not rung.by_step}
    return why


def _changes(a: Record, b: Record) -> dict[str, tuple[str, str]]:
    """Fields of the request, and circumstances, that differ."""
    first, second = _fields(a), _fields(b)
    if first["corpus_sha256"] == second["corpus_sha256"]:  # a copy of the same text
        second["experiment.data.source"] = first.get("experiment.data.source", "")
    both = {field: (first.get(field, "-"), second.get(field, "-")) for field in first | second}
    return {field.removeprefix("experiment."): pair for field, pair in both.items() if pair[0] != pair[1]}


def _fields(run: Record) -> dict[str, str]:
    manifest, asked = run.manifest, msgspec.to_builtins(run.request) if run.request else {}
    found = {name: value for name, value in asked.items() if name not in NO_NUMBER}
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
    """The figures of the cost table, then the bytes of each collective in a step."""
    of_a, of_b = figures(a), figures(b)
    both = [metric for metric in METRICS if metric.form and metric.key in of_a.keys() & of_b.keys()]
    costs = {metric.key: (of_a[metric.key], of_b[metric.key]) for metric in both}
    sent_a, sent_b = (
        {" ".join(f"{row.kind} {row.axis} {row.purpose} (bytes)".split()): row.bytes for row in rows}
        for rows in (summed(run.ledger.rows) for run in (a, b))
    )
    return costs | {name: (sent_a.get(name, 0), sent_b.get(name, 0)) for name in sorted(sent_a | sent_b)}
