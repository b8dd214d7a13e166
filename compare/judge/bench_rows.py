"""The rows of a bench's table: each case reduced over its rounds, and divided by its baseline."""

import statistics
from collections.abc import Callable, Mapping

from msgspec import Struct

from compare.judge.closed_forms.flops import model_flops_per_token
from compare.judge.outcome import Case
from compare.judge.peaks import peak_flops
from compare.judge.statistics import Estimate, estimate, ratios
from compare.judge.timed_outcome import Measurement, TimedOutcome


class BenchRow(Struct, frozen=True, kw_only=True):
    """Figures of one case: medians over its rounds."""

    case: str
    label: str
    block: str
    engine: str
    devices: int
    rounds: int
    wall_ms: float
    """Of a step in a window, where nothing waits for it."""
    wall_ratio: Estimate | None
    """Over the baseline's, of the same round; None without one."""
    cpu_ms: float
    """Of a step, over all processes."""
    cpu_ratio: Estimate | None
    single_ms: float
    """Of a step that is waited for."""
    tokens_per_s: float
    flops_per_s: float
    """The model's own, without recomputation: `closed_forms.flops`."""
    of_ceiling: float | None
    """Fraction of the fastest matrix product of its side on this machine; None where it was not measured."""
    mfu: float | None
    """Fraction of the devices' peak; None for a device whose peak is not known."""
    compile_s: float
    first_step_s: float
    start_up_s: float
    peak_mem_bytes: int


def blocks(result: TimedOutcome) -> dict[str, list[BenchRow]]:
    """A row for every case that finished once, by block, in the order of the cases."""
    found: dict[str, list[BenchRow]] = {}
    for case in result.cases:
        own = by_round(result, case)
        if own:
            found.setdefault(case.block, []).append(_row(result, case, own))
    return found


def by_round(result: TimedOutcome, case: Case) -> dict[int, Measurement]:
    """A case's measurements by the number of their round."""
    return {one.round: one for one in result.measurements if one.case == case.name}


def baseline_of(result: TimedOutcome, case: Case) -> Case | None:
    """What a case is divided by: see `TimedOutcome.baseline`. None if there is no such case."""
    for other in result.cases:
        if other.size != case.size or other.variant or other.copy > 1:
            continue
        if result.baseline == f"{other.engine}.{other.layout}":
            return other
        if result.baseline == other.engine and other.layout == case.layout:
            return other
    return None


def _row(result: TimedOutcome, case: Case, own: Mapping[int, Measurement]) -> BenchRow:
    def median(figure: Callable[[Measurement], float]) -> float:
        return statistics.median(map(figure, own.values()))

    baseline = baseline_of(result, case)
    base = by_round(result, baseline) if baseline else {}

    def ratio(figure: Callable[[Measurement], float]) -> Estimate | None:
        found = ratios(
            {number: figure(one) for number, one in own.items()},
            {number: figure(one) for number, one in base.items()},
        )
        return estimate(found) if found and baseline != case else None

    wall_ms = median(lambda one: one.wall_ms)
    tokens_per_s = case.experiment.tokens_per_step / wall_ms * 1e3
    flops_per_s = tokens_per_s * model_flops_per_token(case.experiment)
    devices, of_ceiling, mfu = case.experiment.layout.devices, None, None
    if ceiling := result.ceilings.get(case.products):
        of_ceiling = flops_per_s / (ceiling.flops_per_s * (devices if result.platform == "gpu" else 1))
    kind = result.how[case.name].device_kind
    if peak := peak_flops(kind, case.experiment.precision.product_dtype):
        mfu = flops_per_s / (peak * devices)
    return BenchRow(
        case=case.name,
        label=case.label,
        block=case.block,
        engine=case.engine,
        devices=devices,
        rounds=len(own),
        wall_ms=wall_ms,
        wall_ratio=ratio(lambda one: one.wall_ms),
        cpu_ms=median(lambda one: one.cpu_ms),
        cpu_ratio=ratio(lambda one: one.cpu_ms),
        single_ms=median(lambda one: statistics.median(one.single_ms)),
        tokens_per_s=tokens_per_s,
        flops_per_s=flops_per_s,
        of_ceiling=of_ceiling,
        mfu=mfu,
        compile_s=median(lambda one: one.compile_s),
        first_step_s=median(lambda one: one.first_step_s),
        start_up_s=median(lambda one: one.start_up_s),
        peak_mem_bytes=max(one.peak_mem_bytes for one in own.values()),
    )
