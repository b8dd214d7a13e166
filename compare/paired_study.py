"""A study that is one comparison: every case is trained once, and held against the first."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from compare.contract.request import Request
from compare.execute.progress import Reporter
from compare.judge.circumstances import Circumstances
from compare.judge.comparison import Comparison, differences, read_comparison
from compare.present.report.render import write_report
from compare.show.findings import Findings, Table
from compare.show.pages import leave_page
from compare.show.terminal import print_findings
from compare.spec.experiment import Experiment, to_toml
from compare.studies.cases import Case, Settings
from compare.studies.paired_run import continue_cases
from compare.study import Study

Cases = tuple[list[Case], dict[str, str]]
"""What is trained, the reference first; and engines that are left out, with the reason."""


class PairedStudy(Study[Comparison], frozen=True, kw_only=True):
    """A question that is answered by holding cases against the first. A subclass says which cases."""

    group = "Prove"
    own_weights: ClassVar = ""
    kept: ClassVar = Comparison
    shows_unfinished: ClassVar = False
    leaves_report: ClassVar[bool] = False
    """The command writes report.html."""
    needs_first: ClassVar[bool] = True
    """The first case is the only possible reference: nothing runs on without it."""

    def cases(self, experiment: Experiment) -> Cases:
        """What is trained of the experiment with the user's overrides. Raises ExperimentError."""
        raise NotImplementedError

    def run_settings(self) -> Settings:
        """How it runs."""
        return self.settings()

    def planned(self, default: Experiment) -> Comparison:
        """The study before anything starts. Raises ExperimentError for what has no effect, or cannot be."""
        experiment = self.asked()
        cases, left_out = self.cases(experiment)
        return Comparison(
            study=self.command,
            name=self.title,
            experiment=experiment,
            platform=self.platform,
            circumstances=Circumstances(),
            requests={
                case.name: Request(engine=case.engine, experiment=case.experiment, fault=case.fault)
                for case in cases
            },
            left_out=left_out,
        )

    def cases_of(self, planned: Comparison) -> list[Case]:
        """Every case, the reference first."""
        return [
            Case(name=name, engine=request.engine, experiment=request.experiment, fault=request.fault)
            for name, request in planned.requests.items()
        ]

    def begun(self, planned: Comparison) -> tuple[Comparison, Path]:
        """Train every case, in a new folder."""
        return self.compare(
            planned.name,
            planned.experiment,
            self.cases_of(planned),
            settings=self.run_settings(),
            needs_first=self.needs_first,
            left_out=planned.left_out,
        )

    def continued(self, folder: Path) -> Comparison:
        """Train what is missing."""
        reporter = Reporter(quiet=self.quiet)
        return continue_cases(
            folder, settings=self.run_settings(), reporter=reporter, needs_first=self.needs_first
        )

    def show(self, outcome: Comparison, folder: Path) -> int:
        """Print it; a page is left by `run`, and by `shardpair report`."""
        if self.leaves_report:
            return self.shown(outcome, folder, picture=None, as_json=self.json)
        found = self.findings(outcome, folder)
        print_findings(found, as_json=self.json)
        return 0 if found.passed else 1

    @classmethod
    def shown(cls, outcome: Comparison, folder: Path, *, picture: Path | None, as_json: bool) -> int:
        """Print it, and leave the report; the picture is of the loss curves. Returns the exit code."""
        found = cls.findings(outcome, folder)
        print_findings(found, as_json=as_json)

        def draw() -> Path:
            if picture:
                from compare.present.report.figures import save_overlay

                save_overlay(picture, outcome.cases, read_comparison(folder)[1])
            return write_report(folder)

        leave_page(draw, as_json=as_json)
        return 0 if found.passed else 1

    @classmethod
    def judged_again(cls, outcome: Comparison, folder: Path) -> tuple[Comparison, list[str]]:
        """The comparison as its records give it now, and where that is not what was saved."""
        anew, _ = read_comparison(folder)
        return anew, differences(outcome, anew)


def paired_findings(
    comparison: Comparison,
    *,
    title: str,
    tables: Sequence[Table],
    sentence: str = "",
    passed: bool | None = None,
    value: object = None,
    **more: Any,
) -> Findings:
    """Findings of a comparison, whose JSON is the comparison itself.

    Args:
        comparison: with at least one finished case.
        title, tables, more: as of `Findings`.
        sentence, passed, value: the comparison's own, and itself, by default.
    """
    return Findings(
        title=title,
        sentence=sentence or comparison.sentence(),
        value=comparison if value is None else value,
        passed=comparison.passed if passed is None else passed,
        tables=tables,
        spec=to_toml(comparison.experiment),
        source=comparison.circumstances.words,
        **more,
    )
