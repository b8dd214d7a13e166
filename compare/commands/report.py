"""`shardpair report`: show a finished run again, from its files."""

from pathlib import Path
from typing import Annotated

import tyro
from msgspec import Struct

from compare.execute.paths import PICTURES, check_output
from compare.show.markdown import markdown
from compare.spec.experiment import Experiment
from compare.studies.registry import read_study
from compare.study import findings_in
from compare.terminal import errors_console


class Report(Struct, frozen=True, kw_only=True):
    """Judge a run again from its records, print its tables, and write its page anew.

    Of run, check, matrix, faults and golden; and of every study, such as bench.
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
        study, saved = read_study(folder)
        outcome, moved = study.judged_again(saved, folder)
        if self.markdown:
            found = findings_in(study, outcome, folder)
            print(markdown(found))
            return self._told(found.passed, moved)
        code = study.shown(outcome, folder, picture=self.picture, as_json=self.json)
        return self._told(not code, moved)

    def _told(self, passed: bool, moved: list[str]) -> int:
        for line in moved:
            errors_console().print(line, style="bold red")
        return 0 if passed and not moved else 1
