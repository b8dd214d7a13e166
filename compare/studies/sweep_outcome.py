"""What came of a sweep: a row for each strategy on each engine, and the verdict; saved as sweep.json.

Efficiency is throughput per device over that of the smallest number of devices: in both kinds of scaling 1
means that devices cost each other nothing.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from compare.contract.record import Record
from compare.host.facts import cores
from compare.host.json_files import read_result, write_json
from compare.judge.closed_forms.flops import model_flops_per_token
from compare.judge.comparison import Comparison
from compare.judge.costs import cost_of, steady_times_ms
from compare.judge.ladder import Verdict
from compare.judge.peaks import model_flops_utilization
from compare.spec.engines.registry import REFERENCE
from compare.studies.sweep import FIRST, SINGLE, SweepPlan, is_a_row

SWEEP = "sweep.json"


class Row(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One strategy on one engine. Times are of steady steps, of one process: an order of magnitude.

    What is None is not written.
    """

    engine: str
    strategy: str
    devices: int
    batch_size: int
    """Sequences in a pass, over all devices."""
    mean_loss: float
    """Over all steps, in nats."""
    final_loss: float
    step_time_ms_mean: float
    step_time_ms_median: float
    tokens_per_s: float
    """Over all devices, at the mean step time."""
    samples_per_s: float
    model_flops_per_s: float
    """Over all devices: `closed_forms.flops`."""
    mfu: float | None = None
    """None for devices without a peak in `judge.peaks`, such as any CPU."""
    peak_mem_bytes: int
    """Of the fullest device."""
    comm_calls: int
    comm_bytes: int
    """Logical bytes of a step: the full tensors."""
    comm_wire_bytes: int
    """Bytes that one device sends in a step, if collectives go round a ring."""
    verdict: str
    """Of the ladder; empty for the reference."""
    passed: bool
    efficiency: float | None = None
    """In scaling; None if what it is held against did not finish."""


class SweepOutcome(Struct, frozen=True, kw_only=True):
    """A sweep so far."""

    plan: SweepPlan
    sentence: str = "nothing has finished"
    """The verdict over everything, in one line."""
    passed: bool = False
    rows: list[Row] = []
    """By engine, strategy and number of devices."""
    left_out: dict[str, str] = {}
    """What an engine refuses, or the experiment or this machine is too small for, and why."""
    failures: dict[str, str] = {}
    """What did not finish, and why."""
    machine: str = ""
    device_kind: str = ""
    cores: int = 0
    versions: dict[str, str] = {}
    created_utc: str = ""
    git_commit: str = ""
    git_dirty: bool = False


def outcome_of(
    plan: SweepPlan, comparisons: Mapping[str, Comparison], records: Mapping[str, Sequence[Record]]
) -> SweepOutcome:
    """Put the comparisons of all batches together.

    Args:
        plan: what was asked for.
        comparisons: by batch.
        records: by batch, of each finished case.
    """
    first = next(iter(comparisons.values()))
    versions = [found for comparison in comparisons.values() for found in comparison.versions]
    finished = [comparison for comparison in comparisons.values() if comparison.cases]
    return SweepOutcome(
        plan=plan,
        sentence=_sentence(comparisons),
        passed=all(comparison.passed for comparison in comparisons.values()),
        rows=_rows(plan, [(comparison, records[name]) for name, comparison in comparisons.items()]),
        left_out=dict(item for one in comparisons.values() for item in one.left_out.items()),
        failures=dict(item for one in comparisons.values() for item in one.failures.items()),
        machine=first.circumstances.machine.system,
        device_kind=finished[0].device_kind if finished else "",
        cores=cores(),
        versions={package: version for found in versions for package, version in found.items()},
        created_utc=first.circumstances.created_utc,
        git_commit=first.circumstances.git_commit,
        git_dirty=first.circumstances.git_dirty,
    )


def save_outcome(outcome: SweepOutcome, folder: Path) -> None:
    """Write sweep.json."""
    write_json(folder / SWEEP, outcome)


def read_outcome(folder: Path) -> SweepOutcome:
    """The outcome as it was saved. Raises RecordError: there is none, or it is garbled."""
    return read_result(folder / SWEEP, SweepOutcome, command="sweep")


def _sentence(comparisons: Mapping[str, Comparison]) -> str:
    """The verdict over all batches; what was left out is counted, and named in a list of its own."""
    alone = {name: msgspec.structs.replace(one, left_out={}) for name, one in comparisons.items()}
    failed = [f"{name}: {one.sentence()}" for name, one in alone.items() if not one.passed]
    verdicts = [verdict for one in alone.values() for verdict in one.verdicts]
    count = sum(len(one.left_out) for one in comparisons.values())
    if len(alone) == 1:
        said = [one.sentence() for one in alone.values()]
    elif failed:
        said = failed
    elif all(verdict.compared_tensors for verdict in verdicts):
        said = [f"PASS: {len(verdicts)} cases agree with the reference of their batch on every rung"]
    else:
        said = [
            f"PASS: the losses of {len(verdicts)} cases agree with those of the reference of their batch; "
            f"gradients and weights were not compared"
        ]
    return "; ".join([*said, *([f"{count} left out"] if count else [])])


def _rows(plan: SweepPlan, comparisons: Sequence[tuple[Comparison, Sequence[Record]]]) -> list[Row]:
    rows = []
    for comparison, records in comparisons:
        verdicts = {verdict.candidate: verdict for verdict in comparison.verdicts}
        for name, record in zip(comparison.cases, records, strict=True):
            if name != FIRST:
                rows.append(_row(record, name.split(".")[1], verdicts.get(name)))
            elif is_a_row(record.manifest.experiment, plan):
                alone, wrong = _row(record, SINGLE, None), "; ".join(comparison.objections)
                verdict = f"FAIL at request: {wrong}" if wrong else alone.verdict
                rows.append(msgspec.structs.replace(alone, passed=not wrong, verdict=verdict))
    engines = list(dict.fromkeys([*([] if REFERENCE in plan.engines else [REFERENCE]), *plan.engines]))
    strategies = list(dict.fromkeys([SINGLE, *plan.strategies]))
    rows.sort(key=lambda row: (engines.index(row.engine), strategies.index(row.strategy), row.devices))
    return [msgspec.structs.replace(row, efficiency=_efficiency(row, rows, plan)) for row in rows]


def _row(record: Record, strategy: str, verdict: Verdict | None) -> Row:
    experiment, cost = record.manifest.experiment, cost_of(record)
    mean_ms = statistics.fmean(steady_times_ms(record))
    tokens_per_s = experiment.tokens_per_step / (mean_ms / 1e3)
    return Row(
        engine=cost.engine,
        strategy=strategy,
        devices=cost.devices,
        batch_size=experiment.train.batch_size,
        mean_loss=cost.mean_loss,
        final_loss=cost.final_loss,
        step_time_ms_mean=mean_ms,
        step_time_ms_median=cost.step_time_ms_median,
        tokens_per_s=tokens_per_s,
        samples_per_s=tokens_per_s / experiment.model.block_size,
        model_flops_per_s=model_flops_per_token(experiment) * tokens_per_s,
        mfu=model_flops_utilization(record.manifest, tokens_per_s),
        peak_mem_bytes=cost.peak_mem_bytes,
        comm_calls=cost.comm_calls,
        comm_bytes=cost.comm_bytes,
        comm_wire_bytes=cost.comm_wire_bytes,
        verdict=verdict.sentence() if verdict else "",
        passed=verdict is None or verdict.passed,
    )


def _efficiency(row: Row, rows: list[Row], plan: SweepPlan) -> float | None:
    """Throughput per device over that of the smallest number of devices; None where nothing is scaled."""
    if plan.scaling == "none":
        return None
    strategy = SINGLE if plan.begins_with_one_device else row.strategy
    wanted = (row.engine, strategy, plan.devices[0])
    for base in rows:
        if (base.engine, base.strategy, base.devices) == wanted:
            return (row.tokens_per_s / row.devices) / (base.tokens_per_s / base.devices)
    return None
