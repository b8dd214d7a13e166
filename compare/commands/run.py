"""`shardpair run` and `resume`: train one experiment with several engines, compare, measure, report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from msgspec.structs import replace

from compare.checkpoint.reader import CheckpointError, read_description
from compare.commands.report.page import (
    REMOVED,
    cost_table,
    ladder_table,
    report,
    without_notes,
    write_report,
)
from compare.contract.request import Rung
from compare.flags import Hidden, Spread
from compare.judge.outcome import OUTCOME, Grid, Outcome, read_outcome, read_run
from compare.run.study import Study
from compare.setup.grid import beside_first
from compare.setup.presets import settings_in
from compare.setup.resuming import any_checkpoint, changed_settings
from compare.show.figures import Figure
from compare.show.findings import Findings, verdict_findings
from compare.spec.experiment import Experiment, ExperimentError
from compare.terminal import errors_console


class Run(Spread, Study, frozen=True, kw_only=True):
    """Train one experiment with each engine, hold the results against each other, and write a report.

    Try:
      shardpair run
      shardpair run demo --engines jax-manual torch-manual
      shardpair run demo --checkpoint.every 50     (then: shardpair resume RUN_DIR)
      shardpair run --continue runs/demo-20260101-120000
    """

    ladder: bool = True
    """Compare gradients, weights and moments, at any size; --no_ladder compares losses and norms alone."""
    keep_tensors: bool = False
    """Keep the gradients, weights and moments that were compared, in every engine's folder. By default they
    are removed once all engines agree; those of a run that failed are always kept."""
    resume: str = ""
    """Begin with a checkpoint's weights, moments and place in the data, on this layout: the folder of a run,
    of one engine's run, or of a checkpoint. See `shardpair resume`."""

    profile: Hidden[bool] = False
    """With the timeline of one step: for a lesson."""

    brief = "train one experiment with each engine, compare, write a report"
    group = "Train and compare"
    keeps_records = True

    @property
    def source(self) -> str:
        """What is resumed; '' to begin at step 0."""
        return self.resume

    @property
    def title(self) -> str:
        """The experiment."""
        return self.experiment

    def cases(self, experiment: Experiment) -> Grid:
        """Every engine under the layout, as far as engines can express it, held against the first."""
        if self.keep_tensors and not self.ladder:
            raise ExperimentError("--keep_tensors has no effect with --no_ladder: there are none")
        engines, left_out = self.fitting(experiment)
        for line in changed_settings(self.source, engines, experiment) if not self.quiet else ():
            errors_console().print(f"resumed with {line} as it was", style="yellow")
        return beside_first(engines, experiment, ladder=self.ladder, profile=self.profile), left_out

    def after(self, outcome: Outcome, folder: Path) -> Outcome:
        """Without the ladder's tensors, unless they are to be kept."""
        if self.keep_tensors:
            return outcome
        files = tensors_of(folder, outcome)
        for file in files:
            file.unlink()
        return replace(outcome, tensors_removed=outcome.tensors_removed or bool(files))

    @classmethod
    def leave(cls, outcome: Outcome, folder: Path) -> Path:
        """Write the report. Returns the page."""
        return write_report(folder)

    @classmethod
    def drawn(cls, outcome: Outcome, folder: Path) -> Sequence[Figure]:
        """The loss curves and their difference."""
        return report(outcome, read_run(folder)[1], folder).figures

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """The ladder, and what each case cost."""
        return verdict_findings(
            outcome,
            tables=[
                *([without_notes(ladder_table(outcome.verdicts))] if outcome.verdicts else []),
                without_notes(cost_table(outcome)),
            ],
            notes=[f"{REMOVED} (run --keep_tensors keeps them)"] if outcome.tensors_removed else [],
        )


class Resume(Run, frozen=True, kw_only=True):
    """Go on from checkpoints, with the engines of the run or others, on the same layout or another.

    What comes is a run of its own, beside the old one, which nothing is changed in: its first step is the one
    after the checkpoint. Give it more steps than the old one had, or go on with one that was cut off.

    Try:
      shardpair run demo --checkpoint.every 20
      shardpair resume runs/demo-20260101-120000/jax-manual --engines torch-manual --layout.dp_replicate 1
    """

    experiment: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")] = ""
    """Folder of a run, each of whose engines goes on from its own newest checkpoint, all at the same step; or
    the folder of one engine's run, or a checkpoint, from which all go on. Give it first."""
    resume: tyro.conf.Suppress[str] = ""

    brief = "go on from checkpoints, on any engines and layout"
    default = ""

    @classmethod
    def default_experiment(cls, name: str) -> Experiment:
        """The experiment of the run or checkpoint. Raises RecordError or CheckpointError: there is none."""
        if not name:
            return Experiment()
        if (Path(name) / OUTCOME).is_file():
            return read_outcome(Path(name)).experiment
        return read_description(any_checkpoint(Path(name))).experiment

    @classmethod
    def layout_written(cls, name: str) -> frozenset[str]:
        """What the run or checkpoint says of the layout. Raises as `default_experiment`."""
        return settings_in(cls.default_experiment(name).layout)

    @property
    def command(self) -> str:
        """What it makes is a run: `shardpair run --continue` goes on with it."""
        return "run"

    @property
    def source(self) -> str:
        """What is resumed. Raises CheckpointError: nothing was given."""
        if not self.experiment:
            raise CheckpointError("resume: give the folder of a run with --checkpoint.every, or a checkpoint")
        return self.experiment

    def chosen(self) -> tuple[str, ...]:
        """The engines asked for; by default those of the run."""
        if self.engines or not (Path(self.source) / OUTCOME).is_file():
            return self.engines
        return tuple(read_outcome(Path(self.source)).cases)


def tensors_of(folder: Path, outcome: Outcome) -> list[Path]:
    """Files of the ladder of every case, if all passed; no link, and none behind one."""
    if not outcome.verdicts or not outcome.passed:
        return []
    cases = [folder / name for name in outcome.finished if not (folder / name).is_symlink()]
    files = [case / f"{rung}.safetensors" for case in cases for rung in Rung]
    return [file for file in files if file.is_file() and not file.is_symlink()]
