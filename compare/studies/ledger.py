"""`shardpair ledger`: what every engine sends in a step, line by line beside the closed form."""

from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
import tyro

from compare.execute.paths import check_output
from compare.flags.arguments import chosen_engines
from compare.flags.chosen_layout import Spread
from compare.host.disk import write_atomically
from compare.judge.comparison import Comparison, read_comparison
from compare.paired_study import Cases, PairedStudy
from compare.present.ledger_lines import findings_of_ledgers, page
from compare.show.findings import Findings
from compare.show.terminal import print_findings
from compare.spec.experiment import Experiment, ExperimentError
from compare.studies.cases import Settings, engine_cases
from compare.studies.ledgers import preset_cases, read_ledgers, shortened
from compare.studies.matrix_cells import LAYOUTS

ALL = "all"


class Ledger(Spread, PairedStudy, frozen=True, kw_only=True):
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

    brief = "what each engine sends in a step, beside the closed form"
    group = "Measure"
    default = "check"
    needs_first = False
    alters_nothing: ClassVar = frozenset({"picture", "results", "rows", "output", "fail_on_unexpected"})

    @property
    def gives_layouts(self) -> bool:
        """True if presets replace the experiment's layout."""
        return bool(self.preset or self.presets)

    def run_settings(self) -> Settings:
        """Without the ladder."""
        return msgspec.structs.replace(self.settings(), ladder=False)

    def asked(self) -> Experiment:
        """The experiment under its layout, with as many steps as a ledger needs."""
        if self.preset and self.presets:
            raise ExperimentError("--preset and --presets: give one of them")
        return self.laid_out(shortened(super().asked()))

    def cases(self, experiment: Experiment) -> Cases:
        """Every engine that can express the layout, or each layout."""
        if self.presets:
            presets = LAYOUTS if self.presets == (ALL,) else list(self.presets)
            return preset_cases(experiment, chosen_engines(self.engines), presets, self.said)
        engines, left_out = self.fitting(experiment)
        return engine_cases(experiment, engines), left_out

    def outcome(self, default: Experiment) -> tuple[Comparison, Path]:
        """Train every engine for its ledger; or read a finished run."""
        check_output("--output", self.output)
        if not self.results:
            return super().outcome(default)
        if self.preset or self.presets or self.overrides(default):
            raise ExperimentError(
                f"--results {self.results} is of a finished run: leave out the layout and the experiment"
            )
        return read_comparison(self.results)[0], self.results

    def show(self, outcome: Comparison, folder: Path) -> int:
        """Print it. Returns 0, or 1 if an engine failed or --fail_on_unexpected found something."""
        found = read_ledgers(folder)
        if self.output:
            write_atomically(self.output, page(found).encode())
        print_findings(findings_of_ledgers(found, folder, places=self.rows), as_json=self.json)
        return 1 if found.missing or (self.fail_on_unexpected and not found.passed) else 0

    @classmethod
    def findings(cls, outcome: Comparison, folder: Path) -> Findings:
        """A table for each layout, and what explains its lines."""
        return findings_of_ledgers(read_ledgers(folder), folder, places=False)
