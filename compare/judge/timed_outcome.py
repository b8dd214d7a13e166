"""Outcome of processes that were timed in rounds.

A case is an engine under a layout, at a size, perhaps with other settings (a variant). Cases that do the same
work, under the same layout and at the same size, stand in a block.
"""

import statistics

import msgspec
from msgspec import Struct, field

from compare.contract.ceiling import Ceiling
from compare.contract.record import Record
from compare.contract.timing import Timing, Window
from compare.judge.outcome import StudyOutcome
from compare.judge.strategy import done_words
from compare.spec.engines.registry import side_of
from compare.spec.experiment import Experiment

MOST_FAILURES = 2
"""Of a case: the first may be bad luck, and is tried again in the next round."""


class TimedCase(Struct, frozen=True, kw_only=True):
    """One row of the table: what is timed."""

    engine: str
    layout: str
    """A preset and its devices, such as ddp-2; see `layout_name`."""
    experiment: Experiment
    size: str = ""
    """Fields that make the work another one; '' for the experiment as it is."""
    variant: str = ""
    """Fields that make the same work another way; '' for the experiment as it is."""
    copy: int = 1
    """2 for an engine that is named a second time, to be held against itself."""

    @property
    def label(self) -> str:
        """Name within its block: torch-manual, torch-manual (2), torch-manual layout.bucket_mb=1."""
        again = f" ({self.copy})" if self.copy > 1 else ""
        return f"{self.engine}{again}{' ' if self.variant else ''}{self.variant}"

    @property
    def block(self) -> str:
        """Name of the work that its figures are for."""
        return f"{self.layout}, {self.size}" if self.size else self.layout

    @property
    def name(self) -> str:
        """Unique in its bench."""
        return f"{self.label}.{self.block}"

    @property
    def products(self) -> str:
        """Who multiplies matrices, and in which dtype: the key of its ceiling."""
        return f"{side_of(self.engine).name} {self.experiment.precision.product_dtype}"


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

    @property
    def loss(self) -> float:
        """Of the last step."""
        return self.losses[-1]

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


class FailedLaunch(Struct, frozen=True, kw_only=True):
    """A process that did not finish."""

    round: int
    case: str
    why: str


class HowItRan(Struct, frozen=True, kw_only=True):
    """How a case ran, as its own manifest says."""

    device_kind: str
    threads: str
    gradient_sync: str
    remat: str
    peak_memory_method: str
    versions: dict[str, str]


class TimedOutcome(StudyOutcome, frozen=True, kw_only=True):
    """Outcome of a study that times its cases in rounds."""

    rounds: int
    """As many as were asked for."""
    timing: Timing
    baseline: str
    """An engine, whose case of the same block is what others are divided by; or ENGINE.LAYOUT, one layout's
    case for all blocks of its size."""
    anyway: bool
    """It was to run on a busy machine, too."""
    is_cached: bool = False
    """Compiled programs were kept between processes: what stands for compilation may be reading one."""
    corpus_sha256: str = ""
    cases: list[TimedCase]
    measurements: list[Measurement] = field(default_factory=list)
    failures: list[FailedLaunch] = field(default_factory=list)
    how: dict[str, HowItRan] = field(default_factory=dict)
    """How every case ran that has finished once."""
    ceilings: dict[str, Ceiling] = field(default_factory=dict)
    """The fastest matrix product on all cores, or on one GPU, by `TimedCase.products`."""

    @property
    def is_blank(self) -> bool:
        """True before the first measurement."""
        return not self.measurements

    @property
    def progress(self) -> str:
        """3 of 5 rounds."""
        return f"{self.finished_rounds} of {self.rounds} rounds"

    @property
    def reasons(self) -> list[str]:
        """Processes that did not finish, and why."""
        return [f"{one.case} failed in round {one.round}: {one.why}" for one in self.failures]

    @property
    def finished_rounds(self) -> int:
        """Rounds in which every case was measured, or had failed for good."""
        return sum(not self.missing(number) for number in range(1, self.rounds + 1))

    def timing_of(self, case: TimedCase) -> Timing:
        """How a case's steps are timed: what it has beyond the windows is waited for."""
        more = case.experiment.train.max_iters - self.timing.steps
        return msgspec.structs.replace(self.timing, single=self.timing.single + more)

    def missing(self, number: int) -> list[TimedCase]:
        """Cases that a round still lacks; not those that have been given up."""
        done = {one.case for one in (*self.measurements, *self.failures) if one.round == number}
        return [case for case in self.cases if case.name not in done and not self.is_given_up(case)]

    def is_given_up(self, case: TimedCase) -> bool:
        """True for a case that has failed `MOST_FAILURES` times: it is not tried again."""
        return sum(one.case == case.name for one in self.failures) >= MOST_FAILURES


def measured(
    record: Record,
    *,
    case: TimedCase,
    number: int,
    start_up_s: float,
    windows_seen_s: float,
    timing: Timing,
    others_cores: float,
) -> Measurement:
    """The figures that a record is reduced to.

    Args:
        record: of a timed run.
        case: which.
        number: of the round, from 1.
        start_up_s: from the start of the process to the record of its first step.
        windows_seen_s: what its windows took by the harness's clock.
        timing: of its steps.
        others_cores: in use by others while it ran.
    """
    manifest = record.manifest
    singles = timing.warmup + timing.window * timing.windows
    return Measurement(
        round=number,
        case=case.name,
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
    )


def how_it_ran(record: Record) -> HowItRan:
    """What a record says of how it ran."""
    manifest, done = record.manifest, done_words(record)
    return HowItRan(
        device_kind=manifest.device_kind,
        threads=manifest.threads,
        gradient_sync=done.gradient_sync,
        remat=done.remat,
        peak_memory_method=manifest.peak_memory_method,
        versions=manifest.versions,
    )
