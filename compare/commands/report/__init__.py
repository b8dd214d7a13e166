"""`shardpair report`: show a finished run again, from its files."""

from pathlib import Path
from typing import Annotated

import tyro
from msgspec import Struct

from compare.commands.registry import read_study
from compare.execute.folders import PICTURES, check_output
from compare.judge.outcome import judging, read_run
from compare.show.figures import save_figures
from compare.spec.experiment import ExperimentError


class Report(Struct, frozen=True, kw_only=True):
    """Print the tables of a finished run or study again, and write its page anew.

    Try:
      shardpair report runs/demo-20260101-120000
    """

    run_dir: Annotated[Path, tyro.conf.Positional]
    """The folder that the command printed."""
    picture: Path | None = None
    """Also save its figures as one file (.png, .svg, .pdf): of a run the loss curves and their difference."""
    json: bool = False
    """Print the outcome as one JSON object on stdout instead of tables."""

    def __call__(self) -> int:
        """Show it. Returns 0 if it is complete and as it should be, else 1."""
        check_output("--picture", self.picture, kinds=PICTURES)
        with judging(self.run_dir):
            study, outcome = read_study(self.run_dir)
            if outcome.keeps_records and outcome.finished:
                read_run(self.run_dir)  # nothing is shown of a run whose records cannot be read
            if self.picture:
                if not (figures := study.drawn(outcome, self.run_dir)):
                    raise ExperimentError(f"--picture {self.picture}: a {outcome.study} has no figures")
                save_figures(self.picture, figures)
            return study.shown(outcome, self.run_dir, as_json=self.json)
