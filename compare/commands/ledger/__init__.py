"""`shardpair ledger`: what every engine sends in a step, flow by flow beside the textbook."""

from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from compare.commands.ledger.table import findings_of_ledgers
from compare.flags import Spread, chosen_engines
from compare.judge.outcome import Grid, Outcome, read_outcome
from compare.run.study import Study
from compare.setup.grid import beside_first, grid
from compare.setup.presets import check_presets, several_presets, spread
from compare.show.findings import Findings
from compare.show.terminal import print_findings
from compare.spec.experiment import Experiment, ExperimentError


class Ledger(Spread, Study, frozen=True, kw_only=True):
    """Line up what each engine sends in a step with the textbook of the layout: what is missing, and what is
    unexpected.

    Each engine trains four steps, and the third is watched. Logical bytes are those of the full tensors, by
    kind, mesh axis and purpose, on a device of each stage of a pipeline. Numbers that go alone (the loss, the
    norm) are left out. For a function or a module of your own see docs/libraries.md.

    Try:
      shardpair ledger --preset fsdp --devices 2
      shardpair ledger --preset tp --rows                   (every place in the program, with its source line)
      shardpair ledger --results runs/demo-20260101-120000  (of a finished run)
    """

    presets: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PRESET...")] = ()
    """Several layouts by name, or `all`, each on 2, 4 or 8 devices: see `shardpair list`."""
    results: Path | None = None
    """Train nothing: read the ledgers of a finished run or check from its folder."""
    rows: bool = False
    """Also print every row: phase, ranks, dtype, loops and source line."""
    fail_on_unexpected: bool = False
    """Exit with 1 if a flow is outside of what its engine may send, or other than the snapshot."""

    brief = "what each engine sends in a step, beside the textbook"
    default = "check"
    # The third of four steps is watched.
    fixed: ClassVar = {"train.max_iters": 4, "train.eval_interval": 0, "checkpoint.every": 0}
    keeps_records = True

    def laid_out(self, experiment: Experiment) -> Experiment:
        """Under --preset; of --presets each case has its own. Raises ExperimentError."""
        if self.preset and self.presets:
            raise ExperimentError("--preset and --presets: give one of them")
        return experiment if self.presets else super().laid_out(experiment)

    def cases(self, experiment: Experiment) -> Grid:
        """Every engine that can express the layout, or each layout."""
        if not self.presets:
            engines, left_out = self.fitting(experiment)
            return beside_first(engines, experiment), left_out
        presets = several_presets(self.presets, experiment.model)
        check_presets("--presets", experiment.layout, list(presets.items()), self.said)
        rows = {name: spread(experiment, name, devices, self.said) for name, devices in presets.items()}
        return grid(chosen_engines(self.engines), rows, as_presets="schedule" not in self.said.flags)

    def outcome(self) -> tuple[Outcome, Path]:
        """Train every engine for its ledger; or read a finished run."""
        if not self.results:
            return super().outcome()
        sections = tuple(f"{name}." for name in Experiment.__struct_fields__)
        if self.preset or self.presets or any(flag.startswith(sections) for flag in self.given):
            raise ExperimentError(
                f"--results {self.results} is of a finished run: leave out the layout and the experiment"
            )
        return read_outcome(self.results), self.results

    def __call__(self) -> int:
        """Answer it. Returns 0, or 1 if an engine failed or --fail_on_unexpected found something."""
        if self.dry_run:
            return super().__call__()
        found = findings_of_ledgers(self.outcome()[1], places=self.rows)
        print_findings(found, as_json=self.json)
        return 1 if found.missing or (self.fail_on_unexpected and not found.passed) else 0

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """A table for each layout, and what is unexpected in it."""
        return findings_of_ledgers(folder, places=False)
