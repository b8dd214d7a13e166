"""`shardpair ledger`: the bytes that every engine sends in a step, and the textbook's."""

from pathlib import Path
from typing import ClassVar

from compare.commands.ledger.table import findings_of_ledgers
from compare.flags import PresetNames, chosen_engines
from compare.judge.outcome import Grid, Outcome
from compare.run.spread import Spread
from compare.run.study import Study
from compare.setup.grid import beside_first, grid, varied
from compare.setup.presets import check_presets, several_presets
from compare.show.findings import Findings
from compare.show.terminal import print_findings
from compare.spec.experiment import Experiment, ExperimentError


class Ledger(Spread, frozen=True, kw_only=True):
    """Compare what each engine sends in a step with the textbook of the layout.

    Each engine trains four steps, and the third is recorded. Logical bytes are those of the full tensors, by
    kind, mesh axis and purpose, on a device of each stage of a pipeline. Scalars (the loss, the norm) are
    left out. For a function or a module of your own see docs/libraries.md.

    Try:
      shardpair ledger --preset fsdp --devices 2
      shardpair ledger --preset tp --rows                   (every place in the program, with its source line)
      shardpair ledger --results runs/demo-20260101-120000  (of a finished run)
    """

    presets: PresetNames = ()
    results: Path | None = None
    """Folder of a finished run or check whose ledgers are shown; nothing is trained."""
    rows: bool = False
    """Also print every row: phase, ranks, dtype, loops and source line."""
    fail_on_unexpected: bool = False
    """Exit with 1 if the layout does not explain a flow."""

    brief = "bytes that each engine sends in a step, and the textbook's"
    default = "check"
    # The third of four steps is watched.
    fixed: ClassVar = {"train.max_iters": 4, "train.eval_interval": 0, "checkpoint.every": 0}
    keeps_records = True

    def resolve(self) -> Experiment:
        """The experiment; --presets replace its layout. Raises ExperimentError."""
        return Study.resolve(self) if self.presets else super().resolve()

    def cases(self, experiment: Experiment) -> Grid:
        """Every engine that can express the layout, or each layout. Raises ExperimentError."""
        if not self.presets:
            engines, left_out = self.fitting(experiment)
            return beside_first(engines, experiment), left_out
        if self.preset:
            raise ExperimentError("--preset and --presets: give one of them")
        presets = several_presets(self.presets, experiment.model)
        check_presets(experiment.layout, presets.items(), self.layout_flags)
        rows, _ = varied(experiment, presets, (), flags=self.layout_flags)
        return grid(chosen_engines(self.engines), rows, as_presets="schedule" not in self.layout_flags)

    def __call__(self) -> int:
        """Print the ledgers. Returns 0, or 1 if an engine failed or --fail_on_unexpected found something."""
        if self.dry_run:
            return super().__call__()
        if self.results:
            sections = tuple(f"{name}." for name in Experiment.__struct_fields__)
            if self.preset or self.presets or any(flag.startswith(sections) for flag in self.given):
                raise ExperimentError(
                    f"--results {self.results} is of a finished run: leave out the layout and the experiment"
                )
        found = findings_of_ledgers(self.results or self.run()[1], places=self.rows)
        print_findings(found, as_json=self.json)
        return 1 if found.missing or (self.fail_on_unexpected and not found.passed) else 0

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """A table for each layout, and the unexpected flows."""
        return findings_of_ledgers(folder, places=False)
