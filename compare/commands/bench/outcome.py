"""Figures of processes that were timed in rounds, and the rows of the table.

Cases with the same layout and size form a block. A row has the medians of a case over its rounds, and their
ratios to the baseline.
"""

import statistics

import msgspec
from msgspec import Struct

from compare.contract.record import Record
from compare.contract.timing import Timing, Window
from compare.judge.outcome import Case, Outcome
from compare.judge.strategy import settings_of, strategy_of
from compare.show.statistics import Estimate, estimate
from compare.spec.engines.registry import REFERENCE
from compare.theory.flops import flops_utilization, model_flops_per_token


class Measurement(Struct, frozen=True, kw_only=True):
    """Figures of one fresh process, or of the ranks that it started."""

    windows: list[Window]
    single_ms: list[float]
    """Wall time of each step that was waited for, after the windows."""
    compile_s: float
    first_step_s: float
    start_up_s: float
    """From the start of the process to its first step, compilation apart."""
    peak_mem_bytes: int
    """Peak of the fullest device."""
    curves: dict[str, list[float]]
    """`Step.loss` and `Step.grad_norm` of every step, from the warm-up on."""
    how: dict[str, str]
    """Device, threads, versions, gradient synchronisation and recomputation of the process."""

    @property
    def wall_ms(self) -> float:
        """Wall time of a step, the median of the windows."""
        return statistics.median(window.wall_s / window.steps for window in self.windows) * 1e3

    @property
    def cpu_ms(self) -> float:
        """CPU time of a step over all processes, the median of the windows."""
        return statistics.median(window.cpu_s / window.steps for window in self.windows) * 1e3


class TimedOutcome(Outcome, frozen=True, kw_only=True):
    """The outcome of a bench, with its figures in their types."""

    timing: Timing
    measurements: dict[str, dict[int, Measurement]]
    """By case and round."""
    baseline: str
    """An engine, whose case is the baseline of each block; or ENGINE.LAYOUT, the baseline of all blocks of
    its size."""

    def baseline_of(self, case: Case) -> Case | None:
        """The case by which a case is divided; None if there is none."""
        mine = case.coordinates
        for other in self.cases.values():
            its = other.coordinates
            is_plain = its.get("size") == mine.get("size") and not {"variant", "copy"} & its.keys()
            is_of_block = self.baseline == other.engine and its.get("layout") == mine.get("layout")
            if is_plain and (is_of_block or self.baseline == f"{other.engine}.{its.get('layout')}"):
                return other
        return None


def read_timings(outcome: Outcome) -> TimedOutcome:
    """The figures of a bench, in their types."""
    cases = list(outcome.cases.values())
    engines = [case.engine for case in cases]
    assert cases[0].request.timing
    return TimedOutcome(
        **{field: getattr(outcome, field) for field in Outcome.__struct_fields__},
        timing=cases[0].request.timing,
        measurements=msgspec.convert(outcome.kept, dict[str, dict[int, Measurement]]),
        baseline=outcome.options.get("baseline") or (REFERENCE if REFERENCE in engines else engines[0]),
    )


def measure(record: Record, *, first_step_after_s: float, timing: Timing) -> Measurement:
    """The figures of a record, whose process took `first_step_after_s` seconds to its first step."""
    manifest = record.manifest
    return Measurement(
        windows=manifest.windows,
        single_ms=[step.step_time_ms for step in record.steps[timing.watched + 1 :]],
        compile_s=manifest.compile_s,
        first_step_s=manifest.first_step_s,
        start_up_s=max(first_step_after_s - manifest.compile_s - manifest.first_step_s, 0.0),
        peak_mem_bytes=max(manifest.peak_memory_bytes),
        curves={name: [getattr(step, name) for step in record.steps] for name in ("loss", "grad_norm")},
        how={
            **manifest.versions,
            **settings_of(record, strategy_of(record)),
            "device_kind": manifest.device_kind,
            "threads": manifest.threads,
            "peak_memory_method": manifest.peak_memory_method,
        },
    )


class BenchRow(Struct, frozen=True, kw_only=True):
    """Figures of one case: medians over its rounds."""

    case: str
    label: str
    block: str
    wall_ms: float
    """Wall time of a step in a window, in which nothing waits for it."""
    wall_ratio: Estimate | None
    """Over the baseline's, of the same round; None without one."""
    cpu_ms: float
    """CPU time of a step, over all processes."""
    cpu_ratio: Estimate | None
    single_ms: float
    """Wall time of a step that is waited for."""
    tokens_per_s: float
    flops_per_s: float
    """The model's own, without recomputation: `theory.flops`."""
    mfu: float | None
    """Fraction of the devices' peak; None for a device whose peak is not known."""
    compile_s: float
    first_step_s: float
    start_up_s: float
    peak_mem_bytes: int


def rows_by_block(result: TimedOutcome) -> dict[str, list[BenchRow]]:
    """A row for every case that finished once, by block, in the order of the cases."""
    rows: dict[str, list[BenchRow]] = {}
    for case in result.cases.values():
        if rounds := result.measurements.get(case.name):
            rows.setdefault(case.block, []).append(_row(result, case, rounds))
    return rows


def _row(result: TimedOutcome, case: Case, rounds: dict[int, Measurement]) -> BenchRow:
    baseline, experiment = result.baseline_of(case), case.experiment
    base = result.measurements.get(baseline.name, {}) if baseline and baseline != case else {}

    def ratio(figure: str) -> Estimate | None:
        pairs = [(rounds[number], base[number]) for number in rounds.keys() & base.keys()]
        return estimate([getattr(a, figure) / getattr(b, figure) for a, b in pairs]) if pairs else None

    medians = {
        figure: statistics.median(getattr(process, figure) for process in rounds.values())
        for figure in ("wall_ms", "cpu_ms", "compile_s", "first_step_s", "start_up_s")
    }
    tokens_per_s = experiment.tokens_per_step / medians["wall_ms"] * 1e3
    return BenchRow(
        case=case.name,
        label=case.label,
        block=case.block,
        **medians,
        wall_ratio=ratio("wall_ms"),
        cpu_ratio=ratio("cpu_ms"),
        single_ms=statistics.median(statistics.median(process.single_ms) for process in rounds.values()),
        tokens_per_s=tokens_per_s,
        flops_per_s=tokens_per_s * model_flops_per_token(experiment),
        mfu=flops_utilization(experiment, rounds[max(rounds)].how["device_kind"], tokens_per_s),
        peak_mem_bytes=max(process.peak_mem_bytes for process in rounds.values()),
    )
