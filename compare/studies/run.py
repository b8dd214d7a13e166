"""`shardpair run`: train one experiment with several engines, compare, measure, report."""

from pathlib import Path
from typing import ClassVar

import msgspec

from compare.execute.tensorboard import require_tensorboard
from compare.flags.chosen_layout import Spread
from compare.judge.comparison import Comparison
from compare.judge.ladder import rungs_of
from compare.paired_study import Cases, PairedStudy, paired_findings
from compare.present.tables import REMOVED, cost_rows, rung_text
from compare.show.findings import Findings, Row, Table, Text
from compare.spec.experiment import Experiment, ExperimentError
from compare.studies.cases import Settings, engine_cases
from compare.studies.ladder_tensors import remove_tensors
from compare.studies.resuming import changed_settings
from compare.terminal import errors_console


class Run(Spread, PairedStudy, frozen=True, kw_only=True):
    """Train one experiment with each engine, hold the results against each other, and write a report.

    Try:
      shardpair run
      shardpair run demo --engines jax-manual torch-manual
      shardpair run cpu --data.source input.txt --model.n_layer 6
      shardpair run demo --preset ddp --devices 4
      shardpair run demo --checkpoint.every 50     (then: shardpair resume RUN_DIR)
      shardpair run --continue runs/demo-20260101-120000
    """

    ladder: bool = True
    """Compare gradients, weights and moments, at any size; --no_ladder compares losses and norms alone."""
    keep_tensors: bool = False
    """Keep the gradients, weights and moments that were compared, in every engine's folder. By default they
    are removed once all engines agree; those of a run that failed are always kept."""
    tensorboard: str = ""
    """A folder for TensorBoard's event files, one in it for each engine; needs the extra tensorboard."""
    resume: str = ""
    """Begin with a checkpoint's weights, moments and place in the data, on this layout: the folder of a run,
    of one engine's run, or of a checkpoint. See `shardpair resume`."""

    brief = "train one experiment with each engine, compare, write a report"
    group = "Train and compare"
    leaves_report = True
    needs_first = False
    alters_nothing: ClassVar = frozenset({"ladder", "keep_tensors", "tensorboard"})

    @property
    def source(self) -> str:
        """What is resumed; '' to begin at step 0."""
        return self.resume

    @property
    def gives_layouts(self) -> bool:
        """True if a preset replaces the experiment's layout."""
        return bool(self.preset)

    @property
    def title(self) -> str:
        """The experiment."""
        return self.experiment

    def asked(self) -> Experiment:
        """The experiment under its layout."""
        return self.laid_out(super().asked())

    def run_settings(self) -> Settings:
        """With what else the command asks."""
        more = {"ladder": self.ladder, "resume": self.source, "tensorboard": self.tensorboard}
        return msgspec.structs.replace(self.settings(), **more)

    def cases(self, experiment: Experiment) -> Cases:
        """Every engine under the layout, as far as engines can express it."""
        engines, left_out = self.fitting(experiment)
        if not self.quiet:
            for line in changed_settings(self.source, engines, experiment):
                errors_console().print(f"resumed with {line} as it was", style="yellow")
        return engine_cases(experiment, engines), left_out

    def outcome(self, default: Experiment) -> tuple[Comparison, Path]:
        """Train and compare; without the ladder's tensors, unless they are to be kept."""
        require_tensorboard(self.tensorboard)
        comparison, folder = super().outcome(default)
        if self.keep_tensors or not comparison.passed:
            return comparison, folder
        try:
            return remove_tensors(folder), folder
        except (ExperimentError, OSError) as error:  # it costs no verdict
            errors_console().print(f"tensors are kept: {error}", style="yellow")
            return comparison, folder

    @classmethod
    def findings(cls, outcome: Comparison, folder: Path) -> Findings:
        """The ladder, and what each case cost."""
        removed = f"{REMOVED} (run --keep_tensors keeps them)"
        return paired_findings(
            outcome,
            title=outcome.name,
            tables=[*([ladder_of(outcome)] if outcome.verdicts else []), costs_of(outcome)],
            notes=[removed] if outcome.tensors_removed else [],
        )


def ladder_of(comparison: Comparison) -> Table:
    """Every case's error on every rung against the first case."""
    verdicts = comparison.verdicts
    return Table(
        name=f"The ladder: relative errors against {comparison.cases[0]}",
        corner="rung",
        columns=[verdict.candidate for verdict in verdicts],
        rows=[
            Row(Text(rung), [rung_text(verdict, rung) for verdict in verdicts]) for rung in rungs_of(verdicts)
        ],
    )


def costs_of(comparison: Comparison) -> Table:
    """Every case's loss, time, memory and communication: a column for each case."""
    return Table(
        name=f"Costs ({comparison.platform.upper()} timings, one process each, not interleaved)",
        corner="per engine",
        columns=comparison.cases,
        rows=[Row(Text(label), [Text(cell) for cell in cells]) for label, cells in cost_rows(comparison)],
    )
