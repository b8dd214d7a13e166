"""`shardpair report`: show a finished study again, from its files."""

from pathlib import Path
from typing import Annotated

import tyro
from msgspec import Struct

from compare.commands.registry import read_study
from compare.execute.folders import PICTURES, check_output
from compare.flags import AsJson
from compare.run.study import show
from compare.show.figures import save_figures
from compare.spec.experiment import ExperimentError


class Report(Struct, frozen=True, kw_only=True):
    """Print the tables of a finished run or study again, and rewrite its page.

    Try:
      shardpair report runs/demo-20260101-120000
    """

    run_dir: Annotated[Path, tyro.conf.Positional]
    """The folder that the command printed."""
    picture: Path | None = None
    """Also save the figures in one file (.png, .svg, .pdf): of a run the loss curves and their difference,
    of a sweep training and validation loss."""
    json: AsJson = False

    def __call__(self) -> int:
        """Print the findings. Returns 0 if the study is complete and passes, else 1."""
        check_output("--picture", self.picture, kinds=PICTURES)
        study, outcome = read_study(self.run_dir)
        if self.picture:
            figures = study.page(outcome, self.run_dir).figures if outcome.finished else ()
            if not figures:
                raise ExperimentError(f"--picture {self.picture}: a {outcome.study} has no figures")
            save_figures(self.picture, figures)
        return show(study, outcome, self.run_dir, as_json=self.json)
