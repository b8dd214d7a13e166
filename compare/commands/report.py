"""`shardpair report`: show a finished run again, from its files."""

from pathlib import Path
from typing import Annotated

import tyro
from msgspec import Struct

from compare.contract.experiment import Experiment
from compare.execute.paths import PICTURES, check_output
from compare.judge.comparison import differences, read_comparison, read_saved
from compare.present.report.render import write_report
from compare.present.tables import print_outcome
from compare.terminal.console import errors_console


class Report(Struct, frozen=True, kw_only=True):
    """Judge a run again from its records, print its tables, and write its report.html anew.

    Says so if the records no longer give the verdict that was saved with them.

    Try:
      shardpair report runs/demo-20260101-120000
    """

    run_dir: Annotated[Path, tyro.conf.Positional]
    """The folder that `shardpair run` printed."""
    picture: Path | None = None
    """Also save the loss curves and their difference as a picture of their own (.png, .svg, .pdf)."""
    json: bool = False
    """Print the outcome as one JSON object on stdout instead of tables."""

    def __call__(self, default: Experiment) -> int:
        """Show it. Returns 0 if the run is complete, its engines agree, and always did; else 1."""
        check_output("--picture", self.picture, kinds=PICTURES)
        comparison, records = read_comparison(self.run_dir)
        moved = differences(read_saved(self.run_dir), comparison)
        if self.picture:
            from compare.present.report.figures import save_overlay

            save_overlay(self.picture, comparison.cases, records)
        print_outcome(comparison, write_report(self.run_dir), as_json=self.json)
        for line in moved:
            errors_console().print(line, style="bold red")
        return 0 if comparison.passed and not moved else 1
