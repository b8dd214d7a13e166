"""`shardpair run` and `resume`: train one experiment with several engines, compare, measure, report."""

import itertools
from pathlib import Path
from typing import Annotated, ClassVar

import tyro
from msgspec.structs import replace

from compare.checkpoint.reader import CheckpointError, read_description
from compare.commands.run.page import REMOVED, cost_table, finding, ladder_table, report
from compare.contract.request import Rung
from compare.execute.cpu_load import warn_of_load
from compare.flags import Hidden
from compare.judge.outcome import OUTCOME, Grid, Outcome, read_outcome, read_run
from compare.run.spread import Spread
from compare.setup.resuming import any_checkpoint, changed_settings
from compare.show.findings import Findings, verdict_findings
from compare.spec.experiment import Experiment, to_toml
from compare.system.disk import write_atomically
from compare.terminal import errors_console

EXPERIMENT = "experiment.toml"


class Run(Spread, frozen=True, kw_only=True):
    """Train one experiment with each engine, compare the results, and write a report.

    Try:
      shardpair run
      shardpair run demo --engines jax-manual torch-manual
      shardpair run demo --checkpoint.every 50     (then: shardpair resume RUN_DIR)
      shardpair run --continue runs/demo-20260101-120000
    """

    ladder: bool = True
    """Compare gradients, weights and moments, at any size. --no_ladder compares losses and norms only."""
    keep_tensors: bool = False
    """Keep the compared gradients, weights and moments in every engine's folder. By default they are removed
    once all engines agree; those of a failed run are always kept."""
    numbers_only: bool = False
    """Compare no strategies: an engine may reach the same numbers in another way than the layout's."""
    resume: str = ""
    """Begin with a checkpoint's weights, moments and position in the data, on this layout: the folder of a
    run, of one engine's run, or of a checkpoint. See `shardpair resume`."""

    profile: Hidden[bool] = False
    """Record the timeline of one step, for a lesson."""

    keeps_records = True
    needs: ClassVar = {**Spread.needs, "keep_tensors": "ladder"}

    @property
    def source(self) -> str:
        """The folder to resume from; '' to begin at step 0."""
        return self.resume

    def cases(self, experiment: Experiment) -> Grid:
        """Each engine that can express the layout, compared with the first."""
        cases, left_out = self.against_first(experiment, ladder=self.ladder, profile=self.profile)
        for line in changed_settings(self.source, cases, experiment) if not self.quiet else ():
            errors_console().print(f"resumed with {line} as it was", style="yellow")
        return cases, left_out

    def end(self, outcome: Outcome, folder: Path) -> Outcome:
        """Remove the ladder's tensors if all cases passed, unless --keep_tensors."""
        removed = outcome.tensors_removed
        if outcome.verdicts and outcome.passed and not self.keep_tensors:
            for name, rung in itertools.product(outcome.finished, Rung):
                file = folder / name / f"{rung}.safetensors"
                removed |= file.is_file()
                file.unlink(missing_ok=True)
        write_atomically(folder / EXPERIMENT, to_toml(outcome.experiment).encode())
        return replace(outcome, tensors_removed=removed)

    @classmethod
    def page(cls, outcome: Outcome, folder: Path) -> Findings:
        """The report: curves, costs, the ladder, memory and messages."""
        return report(outcome, read_run(folder)[1], folder)

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """The ladder, and the costs of each case."""
        tables = [*([ladder_table(outcome.verdicts)] if outcome.verdicts else []), cost_table(outcome)]
        return verdict_findings(
            outcome,
            sentence=finding(outcome),
            tables=[replace(table, below="") for table in tables],
            warnings=warn_of_load(outcome),
            notes=[f"{REMOVED} (run --keep_tensors keeps them)"] if outcome.tensors_removed else [],
        )


class Resume(Run, frozen=True, kw_only=True):
    """Continue from checkpoints, with the engines of the run or others, on the same layout or another.

    Makes a new run; the old one is not changed. Its first step is the one after the checkpoint. Give it more
    steps than the old run had, or continue one that ended early.

    Try:
      shardpair run demo --checkpoint.every 20
      shardpair resume runs/demo-20260101-120000/jax-manual --engines torch-manual --layout.dp_replicate 1
    """

    experiment: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")] = ""
    """Folder of a run, each of whose engines continues from its own checkpoint, at the newest step that all
    have; or the folder of one engine's run, or a checkpoint, from which all continue."""
    resume: tyro.conf.Suppress[str] = ""

    default = ""
    command = "run"

    @classmethod
    def default_experiment(cls, name: str) -> Experiment:
        """The experiment of the run or checkpoint. Raises RecordError or CheckpointError: there is none."""
        if not name:
            return Experiment()
        if (Path(name) / OUTCOME).is_file():
            return read_outcome(Path(name)).experiment
        return read_description(any_checkpoint(Path(name))).experiment

    @property
    def source(self) -> str:
        """The folder to resume from. Raises CheckpointError: none was given."""
        if not self.experiment:
            raise CheckpointError("resume: give the folder of a run with --checkpoint.every, or a checkpoint")
        return self.experiment

    def cases(self, experiment: Experiment) -> Grid:
        """Each named engine; by default the engines of the run."""
        if self.engines or not (Path(self.source) / OUTCOME).is_file():
            return super().cases(experiment)
        return Run.cases(replace(self, engines=tuple(read_outcome(Path(self.source)).cases)), experiment)
