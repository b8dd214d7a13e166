"""A study that times its cases: fresh processes, in rounds whose order rotates."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from compare.contract.timing import Timing
from compare.execute import load
from compare.execute.here import here_and_now
from compare.execute.launch import EnvironmentMissing, Prepared, freeze_data, prepare
from compare.execute.progress import Reporter
from compare.judge.bench_agreement import mistakes
from compare.judge.bench_rows import baseline_of
from compare.judge.timed_outcome import TimedCase, TimedOutcome
from compare.numerics.data import open_corpus
from compare.present.bench_words import warnings
from compare.show.findings import Findings, Table
from compare.spec.engines.registry import REFERENCE
from compare.spec.experiment import Experiment, ExperimentError, edited, revalidate
from compare.studies.bench_cases import layout_name
from compare.studies.cases import Case, Settings
from compare.studies.fitting import require_case, require_sides
from compare.studies.rounds import Rounds
from compare.studies.runner import new_folder, saved_in
from compare.study import DrawnStudy, Edits, findings_of

STANDARD = Timing()
Cases = tuple[list[TimedCase], dict[str, str]]
"""What is timed; and what is left out, by name, with the reason."""


class TimedStudy(DrawnStudy[TimedOutcome], frozen=True, kw_only=True):
    """A question that is answered by timing cases in rounds. A subclass has a docstring of its own."""

    rounds: int = 5
    """How often each case is timed. From fewer than five rounds no interval can be told."""
    window: int = STANDARD.window
    """Steps of a window, inside of which nothing waits for the devices."""
    windows: int = STANDARD.windows
    """Windows of a process."""
    anyway: bool = False
    """Time on a busy machine, too; the record then says so."""

    decided: ClassVar = {"train.max_iters": "--window and --windows"}
    own_weights: ClassVar = "the time of a step does not depend on the weights"
    kept: ClassVar = TimedOutcome
    alters_nothing: ClassVar = frozenset({"picture", "anyway"})

    def cases(self, experiment: Experiment) -> Cases:
        """What is timed of the experiment with the user's overrides. Raises ExperimentError."""
        raise NotImplementedError

    @staticmethod
    def case(
        engine: str, experiment: Experiment, edits: Edits, *, size: str = "", variant: str = ""
    ) -> TimedCase:
        """A case of an experiment with other values in some fields. Raises ExperimentError.

        Args:
            engine: which.
            experiment: with the user's overrides.
            edits: fields and their values by section.
            size, variant: its name, as of `TimedCase`.
        """
        whole, layout = revalidate(edited(experiment, edits)), layout_name(experiment.layout)
        return TimedCase(engine=engine, layout=layout, size=size, variant=variant, experiment=whole)

    @classmethod
    def measure_beside(cls, outcome: TimedOutcome, folder: Path, *, settings: Settings, quiet: bool) -> None:
        """Measure what the findings need beside the rounds, once; nothing by default."""

    @property
    def timing(self) -> Timing:
        """Of a process's steps."""
        return Timing(window=self.window, windows=self.windows)

    def divisor(self) -> str:
        """What others are divided by: see `TimedOutcome.baseline`; '' for the default."""
        return ""

    def planned(self, default: Experiment) -> TimedOutcome:
        """The study before anything starts. Raises ExperimentError for what has no effect, or cannot be."""
        experiment = self.asked()
        cases, left_out = self.cases(experiment)
        settings, timing, baseline = self.settings(), self.timing, self.divisor()
        engines = [case.engine for case in cases]
        if self.rounds < 1:
            raise ExperimentError(f"--rounds {self.rounds} must be at least 1")
        if timing.window < 1 or timing.windows < 1:
            raise ExperimentError(
                f"--window {timing.window} and --windows {timing.windows} must be at least 1"
            )
        for case in cases:
            require_case(case.engine, case.experiment, platform=settings.platform, hosts=settings.hosts)
        result = TimedOutcome(
            study=self.command,
            name=self.title,
            experiment=experiment,
            platform=settings.platform,
            circumstances=here_and_now(),
            rounds=self.rounds,
            timing=timing,
            baseline=baseline or (REFERENCE if REFERENCE in engines else engines[0]),
            anyway=self.anyway,
            is_cached=bool(settings.cache_dir),
            cases=cases,
            left_out=left_out,
        )
        if why := left_out.get(baseline):
            raise EnvironmentMissing(f"--baseline {baseline}: {why}")
        if baseline and not any(baseline_of(result, case) for case in cases):
            there = dict.fromkeys(f"{case.engine}.{case.layout}" for case in cases)
            raise ExperimentError(
                f"--baseline {baseline}: no such case; give an engine that is timed, or one with its layout "
                f"(there are {', '.join(there)})"
            )
        return result

    def cases_of(self, planned: TimedOutcome) -> list[Case]:
        """Every case once."""
        return [Case(name=one.name, engine=one.engine, experiment=one.experiment) for one in planned.cases]

    def begun(self, planned: TimedOutcome) -> tuple[TimedOutcome, Path]:
        """Time every case of a plan."""
        busy, settings, reporter = load.busy_cores(), self.settings(), Reporter(quiet=self.quiet)
        load.require_idle(busy, anyway=planned.anyway)
        require_sides([case.engine for case in planned.cases], settings.pythons)
        reporter.reads(planned.experiment)
        with new_folder(planned.name, self.run_dir) as folder:
            prepared = prepare(planned.experiment, folder)
            result = msgspec.structs.replace(planned, corpus_sha256=prepared.corpus_sha256)
            result = Rounds(result, folder, settings, reporter, prepared, busy).run()
        return self._with_more(result, folder), folder

    def continued(self, folder: Path) -> TimedOutcome:
        """Time what is missing. Raises ExperimentError: the data has changed."""
        with saved_in(folder, self.kept, begun="timed") as saved:
            frozen = freeze_data(saved.experiment, folder)
            prepared = Prepared(experiment=frozen, folder=folder, corpus_sha256=open_corpus(frozen).sha256)
            if prepared.corpus_sha256 != saved.corpus_sha256:
                raise ExperimentError(f"{folder}: its data has changed since; start a new {saved.study}")
            again = msgspec.structs.replace(saved, anyway=self.anyway or saved.anyway)
            busy, settings, reporter = load.busy_cores(), self.settings(), Reporter(quiet=self.quiet)
            load.require_idle(busy, anyway=again.anyway)
            result = Rounds(again, folder, settings, reporter, prepared, busy).run()
        return self._with_more(result, folder)

    def _with_more(self, result: TimedOutcome, folder: Path) -> TimedOutcome:
        settings = msgspec.structs.replace(self.settings(), platform=result.platform)
        self.measure_beside(result, folder, settings=settings, quiet=self.quiet)
        return result


def timed_findings(
    outcome: TimedOutcome, *, title: str, sentence: str, tables: Sequence[Table], rows: object, **more: Any
) -> Findings:
    """Findings with what spoils them: they pass if every case finished, and did the same work in its time.

    Args:
        outcome, title, sentence, tables, rows, more: as of `findings_of`.
    """
    return findings_of(
        outcome,
        title=title,
        sentence=sentence,
        tables=tables,
        rows=rows,
        passed=bool(outcome.measurements) and not outcome.failures and not mistakes(outcome),
        warnings=warnings(outcome),
        **more,
    )
