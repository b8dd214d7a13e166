"""`shardpair run`: train one experiment with several engines, compare, measure, report."""

from functools import partial
from pathlib import Path

import msgspec

from compare.commands.chosen_layout import Spread
from compare.commands.pages import leave_page
from compare.commands.pruning import remove_tensors
from compare.execute.tensorboard import require_tensorboard
from compare.judge.comparison import Comparison
from compare.present.report.render import write_report
from compare.present.tables import print_outcome
from compare.spec.experiment import Experiment, ExperimentError
from compare.studies.cases import Case, engine_cases
from compare.studies.resuming import changed_settings
from compare.terminal.console import errors_console


class Run(Spread, frozen=True, kw_only=True):
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

    @property
    def source(self) -> str:
        """What is resumed; '' to begin at step 0."""
        return self.resume

    def __call__(self, default: Experiment) -> int:
        """Run it. Returns the exit code: 0 if all engines agree, else 1."""
        if self.dry_run:
            experiment, cases, left_out = self._planned(default)
            return self.show_plan(experiment, cases, left_out, resume=self.source)
        comparison, folder = self.outcome(default)
        comparison = self._tidied(comparison, folder)
        print_outcome(comparison, as_json=self.json)
        leave_page(partial(write_report, folder), as_json=self.json)
        return 0 if comparison.passed else 1

    def _tidied(self, comparison: Comparison, folder: Path) -> Comparison:
        """The comparison without its tensors, unless they are to be kept; an error costs no verdict."""
        if self.keep_tensors or not comparison.passed:
            return comparison
        try:
            return remove_tensors(folder)
        except (ExperimentError, OSError) as error:
            errors_console().print(f"tensors are kept: {error}", style="yellow")
            return comparison

    def outcome(self, default: Experiment) -> tuple[Comparison, Path]:
        """Train and compare; nothing is printed on stdout.

        Args:
            default: the experiment before the user's overrides.

        Returns:
            The comparison, and its folder.
        """
        experiment, cases, left_out = self._planned(default)
        comparison, folder = self.compare(
            self.experiment,
            experiment,
            cases,
            settings=msgspec.structs.replace(
                self.settings(), ladder=self.ladder, resume=self.source, tensorboard=self.tensorboard
            ),
            needs_first=False,
            left_out=left_out,
        )
        return comparison, folder

    def _planned(self, default: Experiment) -> tuple[Experiment, list[Case], dict[str, str]]:
        """The experiment under its layout, its cases, and the engines that are none."""
        require_tensorboard(self.tensorboard)
        experiment = self.laid_out(self.resolved(is_spread=not self.preset))
        self.require_nothing_else(default, engines=self.engines, preset=self.preset, resume=self.resume)
        engines, left_out = self.fitting(experiment)
        if not self.quiet and not self.continue_:
            for line in changed_settings(self.source, engines, experiment):
                errors_console().print(f"resumed with {line} as it was", style="yellow")
        return experiment, engine_cases(experiment, engines), left_out
