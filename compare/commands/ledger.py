"""`shardpair ledger`: what every engine sends in a step, line by line beside the closed form."""

from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from compare.commands.arguments import chosen_engines
from compare.commands.chosen_layout import Spread
from compare.execute.paths import check_output
from compare.host.disk import write_atomically
from compare.present.ledger_lines import findings_of_ledgers, page
from compare.show.terminal import print_findings
from compare.spec.experiment import Experiment, ExperimentError
from compare.studies.cases import Case, engine_cases
from compare.studies.ledgers import preset_cases, read_ledgers, shortened
from compare.studies.matrix import LAYOUTS

ALL = "all"


class Ledgers(Spread, frozen=True, kw_only=True):
    """Line up what each engine sends in a step with the closed form of the layout: what is missing, what is
    unexpected, and why.

    Each engine trains four steps, and the third is watched. Logical bytes are those of the full tensors, by
    kind, mesh axis and purpose, on a device of each stage of a pipeline. Numbers that go alone (the loss, the
    norm) are left out. For a function or a module of your own see docs/libraries.md.

    Try:
      shardpair ledger --preset fsdp --devices 2
      shardpair ledger --preset tp --rows                   (every place in the program, with its source line)
      shardpair ledger --results runs/demo-20260101-120000  (of a finished run)
      shardpair ledger check --presets ddp fsdp tp --fail_on_unexpected
    """

    presets: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PRESET...")] = ()
    """Several layouts by name, or `all` of the parity matrix, each on as many devices as there: 2, 4 or 8."""
    results: Path | None = None
    """Train nothing: read the ledgers of a finished run, check or matrix study from its folder."""
    rows: bool = False
    """Also print every row: phase, ranks, dtype, loops and source line."""
    output: Path | None = None
    """Also write the lines as Markdown."""
    fail_on_unexpected: bool = False
    """Exit with 1 if a line is not as in the closed form, no known pattern explains it, and it is new."""

    def __call__(self, default: Experiment) -> int:
        """Show them. Returns the exit code: 0, or 1 if an engine failed or --fail_on_unexpected found one."""
        check_output("--output", self.output)
        if self.results and (self.preset or self.presets or self.overrides(default)):
            raise ExperimentError(
                f"--results {self.results} is of a finished run: leave out the layout and the experiment"
            )
        if self.results:
            return self._shown(self.results)
        experiment, cases, left_out = self._planned(default)
        if self.dry_run:
            return self.show_plan(experiment, cases, left_out)
        settings = msgspec.structs.replace(self.settings(), ladder=False)
        _, folder = self.compare(
            "ledger", experiment, cases, settings=settings, needs_first=False, left_out=left_out
        )
        return self._shown(folder)

    def _planned(self, default: Experiment) -> tuple[Experiment, list[Case], dict[str, str]]:
        """The experiment, its cases, and the engines that are none."""
        self.require_nothing_else(default, engines=self.engines, preset=self.preset, presets=self.presets)
        if self.preset and self.presets:
            raise ExperimentError("--preset and --presets: give one of them")
        if self.presets:
            experiment = shortened(self.resolved(is_spread=False))
            presets = LAYOUTS if self.presets == (ALL,) else list(self.presets)
            return experiment, *preset_cases(experiment, chosen_engines(self.engines), presets, self.said)
        experiment = shortened(self.laid_out(self.resolved(is_spread=not self.preset)))
        engines, left_out = self.fitting(experiment)
        return experiment, engine_cases(experiment, engines), left_out

    def _shown(self, folder: Path) -> int:
        found = read_ledgers(folder)
        if self.output:
            write_atomically(self.output, page(found).encode())
        print_findings(findings_of_ledgers(found, folder, places=self.rows), as_json=self.json)
        return 1 if found.missing or (self.fail_on_unexpected and not found.passed) else 0
