"""A study whose parts are each measured once: nothing is timed, or time is not what is asked.

A part is some cases that are trained and held against the first of them, or whatever `Survey.measure` makes
of it. Its result is kept as soon as it is there, and the folders of its runs are removed.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic

import msgspec
from msgspec import Struct

from compare.contract.record import Record, read_record
from compare.execute.here import here_and_now
from compare.execute.launch import EngineError
from compare.execute.progress import Reporter
from compare.judge.circumstances import Circumstances
from compare.judge.comparison import COMPARISON, Comparison, read_saved
from compare.judge.outcome import PartsOutcome, R
from compare.show.findings import Findings, Table
from compare.spec.experiment import Experiment
from compare.studies.cases import Case
from compare.studies.runner import Runner, new_folder, saved_in
from compare.study import DrawnStudy, findings_of
from compare.terminal import printable


class Part(Struct, frozen=True, kw_only=True):
    """What is measured in one go, and kept as one result."""

    name: str
    """Unique in its study."""
    cases: list[Case]
    """What it trains; the first is what others are held against."""


Parts = tuple[list[Part], dict[str, str]]
"""What is measured; and what is left out, by name, with the reason."""


class Survey(DrawnStudy[PartsOutcome[R]], Generic[R], frozen=True, kw_only=True):
    """A question that is answered part by part. A subclass says which, and what is kept of each."""

    asks: ClassVar[Mapping[str, object]] = {"ladder": False}
    """Fields of `Settings` for its runs: by default they leave no gradients, weights and moments."""

    def parts(self, experiment: Experiment) -> Parts:
        """What is measured of the experiment with the user's overrides. Raises ExperimentError."""
        raise NotImplementedError

    def result(self, comparison: Comparison, records: Mapping[str, Record]) -> R:
        """What is kept of a part, all of whose cases have finished.

        Args:
            comparison: of its cases.
            records: theirs, by name.
        """
        raise NotImplementedError

    def measure(self, part: Part, place: Path) -> R:
        """Measure a part; by default train its cases, and keep `result`.

        Args:
            part: which.
            place: its folder, which is not there, or is that of a comparison to go on with.

        Raises:
            EngineError, RecordError: it did not finish; other parts still may.
        """
        return self.result(*self.trained(part.cases, place))

    def trained(
        self, cases: list[Case], place: Path, **settings: Any
    ) -> tuple[Comparison, dict[str, Record]]:
        """Train cases in a folder, and hold them against the first.

        Args:
            cases: the reference first.
            place: as of `measure`.
            settings: fields of `Settings` beside `asks`.

        Raises:
            EngineError: one did not finish.
        """
        if not (place / COMPARISON).is_file():
            shutil.rmtree(place, ignore_errors=True)  # of a process that was killed
        comparison, folder = self.compare(
            place.name,
            cases[0].experiment,
            cases,
            run_dir=str(place),
            settings=msgspec.structs.replace(self.settings(), **{**self.asks, **settings}),
            needs_first=False,
        )
        if not comparison.is_complete:
            raise EngineError(comparison.sentence(), exit_code=1)
        return comparison, {name: read_record(folder / name) for name in comparison.cases}

    def planned(self, default: Experiment) -> PartsOutcome[R]:
        """The study before anything starts. Raises ExperimentError for what has no effect, or cannot be."""
        experiment = self.asked()
        parts, left_out = self.parts(experiment)
        return PartsOutcome(
            study=self.command,
            name=self.title,
            experiment=experiment,
            platform=self.platform,
            circumstances=Circumstances(),
            left_out=left_out,
            options=msgspec.to_builtins({name: getattr(self, name) for name in self.own_flags()}),
            parts=[part.name for part in parts],
        )

    @classmethod
    def again(cls, outcome: PartsOutcome[R]) -> "Survey[R]":
        """The study as it was asked for, from its outcome."""
        sections = msgspec.to_builtins(outcome.experiment)
        return msgspec.convert({**sections, **outcome.options, "platform": outcome.platform}, cls)

    @classmethod
    def parts_of(cls, outcome: PartsOutcome[R]) -> dict[str, Part]:
        """The parts of an outcome, by name."""
        return {part.name: part for part in cls.again(outcome).parts(outcome.experiment)[0]}

    def cases_of(self, planned: PartsOutcome[R]) -> list[Case]:
        """Every case of every part."""
        return [
            msgspec.structs.replace(case, name=f"{part.name}: {case.name}")
            for part in self.parts_of(planned).values()
            for case in part.cases
        ]

    def begun(self, planned: PartsOutcome[R]) -> tuple[PartsOutcome[R], Path]:
        """Measure every part, in a new folder."""
        begun = msgspec.structs.replace(planned, circumstances=here_and_now())
        with new_folder(planned.name, self.run_dir) as folder:
            return self._measured(begun, folder), folder

    def continued(self, folder: Path) -> PartsOutcome[R]:
        """Measure what is missing, with the same source."""
        with saved_in(folder, self.kept) as saved:
            return self._measured(msgspec.structs.replace(saved, failures={}), folder)

    def _measured(self, outcome: PartsOutcome[R], folder: Path) -> PartsOutcome[R]:
        asked = self.again(outcome)
        own = {name: getattr(asked, name) for name in self.own_flags()}
        mine = msgspec.structs.replace(self, platform=outcome.platform, **own)
        parts, reporter = self.parts_of(outcome), Reporter(quiet=self.quiet)
        return _Parts(outcome, folder, self.settings(), reporter, mine, parts).run()


class _Parts(Runner[PartsOutcome[R]], Generic[R]):
    """A piece is a part; the folder of its runs is removed once its result is there."""

    survey: Survey[R]
    parts: dict[str, Part]

    def pieces(self) -> Iterator[str]:
        for name in self.outcome.missing:
            number = self.outcome.parts.index(name) + 1
            self.reporter.console.print(printable(f"part {number} of {len(self.parts)}: {name}"))
            yield name
            if name in self.outcome.results:
                shutil.rmtree(self._place(name), ignore_errors=True)

    def measured(self, piece: str) -> PartsOutcome[R]:
        place = self._place(piece)
        return _with_result(self.outcome, piece, self.survey.measure(self.parts[piece], place), place)

    def failed(self, piece: str, error: EngineError) -> PartsOutcome[R]:
        failures = self.outcome.failures | {piece: str(error)}
        return msgspec.structs.replace(self.outcome, failures=failures)

    def _place(self, name: str) -> Path:
        return self.folder / name.replace("/", "_")


def _with_result(outcome: PartsOutcome[R], name: str, found: R, place: Path) -> PartsOutcome[R]:
    """The outcome with one more result, and with the versions of Python and packages that gave it."""
    versions = dict(outcome.circumstances.versions)
    for comparison in place.rglob(COMPARISON):
        for of_case in read_saved(comparison.parent).versions:
            versions |= of_case
    results = outcome.results | {name: found}
    return msgspec.structs.replace(
        outcome,
        circumstances=msgspec.structs.replace(outcome.circumstances, versions=versions),
        results={part: results[part] for part in outcome.parts if part in results},
    )


def survey_findings(
    outcome: PartsOutcome,
    *,
    title: str,
    sentence: str,
    tables: Sequence[Table],
    rows: object,
    passed: bool = True,
    **more: Any,
) -> Findings:
    """Findings of a survey, which passes only if no part is missing: see `findings_of`."""
    missing = dict.fromkeys(outcome.missing, "was not measured") | {
        name: f"did not finish: {why}" for name, why in outcome.failures.items()
    }
    return findings_of(
        outcome,
        title=title,
        sentence=sentence,
        tables=tables,
        rows=rows,
        passed=passed and not missing,
        missing=missing,
        **more,
    )
