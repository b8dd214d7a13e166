"""`shardpair report`: show a finished run again, from its files."""

from pathlib import Path
from typing import Annotated

import tyro
from msgspec import Struct

from compare.commands import collectives
from compare.commands.sweep import show as show_sweep
from compare.execute.paths import PICTURES, check_output
from compare.host.tensors import RecordError
from compare.judge.comparison import COMPARISON, differences, read_comparison, read_saved
from compare.show.markdown import markdown
from compare.spec.experiment import Experiment, ExperimentError
from compare.studies.collectives import RESULT as COLLECTIVES
from compare.studies.collectives import read_bench as read_collectives
from compare.studies.registry import STUDIES, read_study
from compare.studies.sweep import batch_name
from compare.studies.sweep_outcome import SWEEP
from compare.studies.sweep_outcome import read_outcome as read_sweep
from compare.study import findings_in
from compare.terminal.console import errors_console


class Report(Struct, frozen=True, kw_only=True):
    """Judge a run again from its records, print its tables, and write its page anew.

    Of run, check, matrix, faults and golden; of sweep and collectives; and of every study, such as bench.
    Says so if the records no longer give the verdict that was saved with them.

    Try:
      shardpair report runs/demo-20260101-120000
    """

    run_dir: Annotated[Path, tyro.conf.Positional]
    """The folder that the command printed."""
    picture: Path | None = None
    """Also save a picture of its own (.png, .svg, .pdf): of a run the loss curves and their difference, of
    collectives and studies their pictures."""
    markdown: bool = False
    """Print the tables of a study as Markdown, for a page of docs."""
    json: bool = False
    """Print the outcome as one JSON object on stdout instead of tables."""

    def __call__(self, default: Experiment) -> int:
        """Show it. Returns 0 if the run is complete, its engines agree, and always did; else 1."""
        check_output("--picture", self.picture, kinds=PICTURES)
        folder = self.run_dir
        if (folder / COLLECTIVES).is_file() or (folder / SWEEP).is_file():
            return self._other()
        study, saved = read_study(folder)
        outcome, moved = study.judged_again(saved, folder)
        if self.markdown:
            found = findings_in(study, outcome, folder)
            print(markdown(found))
            return self._told(found.passed, moved)
        code = study.shown(outcome, folder, picture=self.picture, as_json=self.json)
        return self._told(not code, moved)

    def _other(self) -> int:
        """What no study of `studies.registry` has left."""
        folder = self.run_dir
        if self.markdown:
            raise ExperimentError(f"--markdown has no effect: {folder} holds no study ({', '.join(STUDIES)})")
        if (folder / COLLECTIVES).is_file():
            return collectives.show(read_collectives(folder), folder, picture=self.picture, as_json=self.json)
        if self.picture:
            raise ExperimentError(
                f"--picture {self.picture} has no effect: the page of {folder} has them all"
            )
        return self._sweep()

    def _sweep(self) -> int:
        """A sweep, each of its batches judged anew."""
        plan = read_sweep(self.run_dir).plan
        names = dict.fromkeys(batch_name(plan.with_batch_for(devices)) for devices in plan.devices)
        begun = [name for name in names if (self.run_dir / name / COMPARISON).is_file()]
        if not begun:
            raise RecordError(
                f"nothing has begun in {self.run_dir}: `shardpair sweep --continue {self.run_dir}`"
            )
        saved = {name: read_saved(self.run_dir / name) for name in begun}
        anew = {
            name: read_comparison(self.run_dir / name)[0] if one.cases else one for name, one in saved.items()
        }
        outcome = show_sweep(plan, anew, self.run_dir, as_json=self.json)
        return self._told(
            outcome.passed, [line for name in begun for line in differences(saved[name], anew[name])]
        )

    def _told(self, passed: bool, moved: list[str]) -> int:
        for line in moved:
            errors_console().print(line, style="bold red")
        return 0 if passed and not moved else 1
