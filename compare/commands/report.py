"""`shardpair report`: show a finished run again, from its files."""

from pathlib import Path
from typing import Annotated

import tyro
from msgspec import Struct

from compare.contract.experiment import Experiment, ExperimentError
from compare.outcome import print_outcome
from compare.pairing import COMPARISON, read_comparison
from compare.paths import PICTURES, check_output
from compare.report.render import write_report


class Report(Struct, frozen=True, kw_only=True):
    """Print the tables of a finished run again, and write its report.html anew.

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
        """Show it. Returns 0 if the run's engines agreed, else 1."""
        if not (self.run_dir / COMPARISON).is_file():
            raise ExperimentError(
                f"{self.run_dir} has no {COMPARISON}: it is not the folder of a finished `shardpair run`"
            )
        check_output("--picture", self.picture, kinds=PICTURES)
        comparison, records = read_comparison(self.run_dir)
        if self.picture:
            from compare.report.figures import save_overlay  # matplotlib takes seconds to import

            save_overlay(self.picture, comparison.cases, records)
        print_outcome(comparison, write_report(self.run_dir), as_json=self.json)
        return 0 if comparison.passed else 1
