"""Outcome of processes that were timed in rounds.

A case is an engine under a layout, at a size, perhaps with other settings (a variant). Cases that do the same
work, under the same layout and at the same size, stand in a block.
"""

import statistics

import msgspec
from msgspec import Struct

from compare.contract.ceiling import Ceiling
from compare.contract.record import Record
from compare.contract.request import Platform
from compare.contract.timing import Timing, Window
from compare.host.tensors import RecordError
from compare.judge.circumstances import Circumstances
from compare.judge.outcome import OUTCOME, Case, Outcome
from compare.judge.strategy import done_words


class HowItRan(Struct, frozen=True, kw_only=True):
    """How a case ran, as its own manifest says."""

    device_kind: str
    threads: str
    gradient_sync: str
    remat: str
    peak_memory_method: str
    versions: dict[str, str]


class Measurement(Struct, frozen=True, kw_only=True):
    """Figures of one fresh process, or of the ranks that it started."""

    round: int
    """Counted from 1."""
    case: str
    windows: list[Window]
    single_ms: list[float]
    """Wall time of each step that was waited for, after the windows."""
    compile_s: float
    first_step_s: float
    start_up_s: float
    """From the start of the process to its first step, compilation apart."""
    peak_mem_bytes: int
    """Of the fullest device."""
    losses: list[float]
    """Of every step, the warm-up's first."""
    grad_norms: list[float]
    """Of the same steps."""
    windows_seen_s: float
    """What the windows took by the harness's clock, from the record of the step before them to theirs."""
    others_cores: float = 0.0
    """In use by others while it ran, a hypervisor's other guests included. NaN: not known, for a launcher's
    processes are not ours to tell from others."""
    how: HowItRan

    @property
    def curves(self) -> dict[str, list[float]]:
        """Loss and norm of every step, by the name of `Step`'s field."""
        return {"loss": self.losses, "grad_norm": self.grad_norms}

    @property
    def wall_ms(self) -> float:
        """Wall time of a step, the median of the windows."""
        return statistics.median(window.wall_s / window.steps for window in self.windows) * 1e3

    @property
    def cpu_ms(self) -> float:
        """CPU time of a step over all processes, the median of the windows."""
        return statistics.median(window.cpu_s / window.steps for window in self.windows) * 1e3


class TimedOutcome(Struct, frozen=True, kw_only=True):
    """What a study that timed its cases has found: an `Outcome` with its figures in their types."""

    platform: Platform
    circumstances: Circumstances
    rounds: int
    """As many as were asked for."""
    finished_rounds: int
    timing: Timing
    baseline: str
    """An engine, whose case of the same block is what others are divided by; or ENGINE.LAYOUT, one layout's
    case for all blocks of its size."""
    anyway: bool = False
    """It was to run on a busy machine, too."""
    is_cached: bool = False
    """Compiled programs were kept between processes: what stands for compilation may be reading one."""
    cases: list[Case]
    measurements: list[Measurement] = []
    failures: dict[str, str] = {}
    ceilings: dict[str, Ceiling] = {}
    """The fastest matrix product on all cores, or on one GPU, by `Case.products`."""

    @property
    def how(self) -> dict[str, HowItRan]:
        """How every case ran that has finished once."""
        return {one.case: one.how for one in self.measurements}


def timed(outcome: Outcome) -> TimedOutcome:
    """The figures of a timed study. Raises RecordError: they are garbled."""
    try:
        kept = [
            msgspec.convert(one, Measurement) for rounds in outcome.kept.values() for one in rounds.values()
        ]
        timing = msgspec.convert(outcome.more["timing"], Timing)
        ceilings = msgspec.convert(outcome.more.get("ceilings", {}), dict[str, Ceiling])
    except (msgspec.ValidationError, KeyError) as error:
        raise RecordError(f"{OUTCOME} is garbled: {error}") from None
    return TimedOutcome(
        platform=outcome.platform,
        circumstances=outcome.circumstances,
        rounds=outcome.rounds,
        finished_rounds=outcome.finished_rounds,
        timing=timing,
        baseline=outcome.more["baseline"],
        anyway=outcome.more["anyway"],
        is_cached=any(case.request.cache_dir for case in outcome.cases.values()),
        cases=list(outcome.cases.values()),
        measurements=sorted(kept, key=lambda one: one.round),
        failures=outcome.failures,
        ceilings=ceilings,
    )


def measured(
    record: Record,
    *,
    case: str,
    number: int,
    start_up_s: float,
    windows_seen_s: float,
    timing: Timing,
    others_cores: float,
) -> Measurement:
    """The figures that a record is reduced to: see `Measurement` for the harness's own."""
    manifest, done = record.manifest, done_words(record)
    singles = timing.warmup + timing.window * timing.windows
    return Measurement(
        round=number,
        case=case,
        windows=manifest.windows,
        single_ms=[step.step_time_ms for step in record.steps[singles:]],
        compile_s=manifest.compile_s,
        first_step_s=manifest.first_step_s,
        start_up_s=max(start_up_s - manifest.compile_s - manifest.first_step_s, 0.0),
        peak_mem_bytes=max(manifest.peak_memory_bytes),
        losses=[step.loss for step in record.steps],
        grad_norms=[step.grad_norm for step in record.steps],
        windows_seen_s=windows_seen_s,
        others_cores=others_cores,
        how=HowItRan(
            device_kind=manifest.device_kind,
            threads=manifest.threads,
            gradient_sync=done.gradient_sync,
            remat=done.remat,
            peak_memory_method=manifest.peak_memory_method,
            versions=manifest.versions,
        ),
    )
