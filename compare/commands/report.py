"""`shardpair report`: show a finished run again, from its files."""

from pathlib import Path
from typing import Annotated

import tyro
from msgspec import Struct

from compare.commands.pages import leave_page
from compare.execute.paths import PICTURES, check_output
from compare.judge.comparison import differences, read_comparison, read_saved
from compare.judge.outcome import OUTCOME
from compare.present.report.render import write_report
from compare.present.tables import print_check, print_faults, print_outcome
from compare.show.markdown import markdown
from compare.spec.experiment import Experiment, ExperimentError
from compare.studies.registry import STUDIES, read_study
from compare.terminal.console import errors_console

_SHOWN = {"check": print_check, "matrix": print_check, "faults": print_faults}
"""What prints a comparison of many cases, a row each, by the command that made it."""


class Report(Struct, frozen=True, kw_only=True):
    """Judge a run again from its records, print its tables, and write its page anew.

    Of run, check, matrix, faults and golden; of sweep; and of every study, such as bench.
    Says so if the records no longer give the verdict that was saved with them.

    Try:
      shardpair report runs/demo-20260101-120000
    """

    run_dir: Annotated[Path, tyro.conf.Positional]
    """The folder that the command printed."""
    picture: Path | None = None
    """Also save a picture of its own (.png, .svg, .pdf): of a run the loss curves and their difference, of
    studies their pictures."""
    markdown: bool = False
    """Print the tables of a study as Markdown, for a page of docs."""
    json: bool = False
    """Print the outcome as one JSON object on stdout instead of tables."""

    def __call__(self, default: Experiment) -> int:
        """Show it. Returns 0 if the run is complete, its engines agree, and always did; else 1."""
        check_output("--picture", self.picture, kinds=PICTURES)
        folder = self.run_dir
        if (folder / OUTCOME).is_file():
            return self._study()
        if self.markdown:
            raise ExperimentError(f"--markdown has no effect: {folder} holds no study ({', '.join(STUDIES)})")
        return self._comparison()

    def _study(self) -> int:
        """Any study of `studies.registry`: its outcome says which."""
        study, saved = read_study(self.run_dir)
        outcome, moved = study.judged_again(saved, self.run_dir)
        if self.markdown:
            found = study.findings(outcome, self.run_dir)
            print(markdown(found))
            return self._told(found.passed, moved)
        code = study.shown(outcome, self.run_dir, picture=self.picture, as_json=self.json)
        return self._told(not code, moved)

    def _comparison(self) -> int:
        """A run, judged anew."""
        comparison, records = read_comparison(self.run_dir)
        moved = differences(read_saved(self.run_dir), comparison)
        _SHOWN.get(comparison.command, print_outcome)(comparison, as_json=self.json)

        def draw() -> Path:
            if self.picture:
                from compare.present.report.figures import save_overlay

                save_overlay(self.picture, comparison.cases, records)
            return write_report(self.run_dir)

        leave_page(draw, as_json=self.json)
        return self._told(comparison.passed, moved)

    def _told(self, passed: bool, moved: list[str]) -> int:
        for line in moved:
            errors_console().print(line, style="bold red")
        return 0 if passed and not moved else 1
