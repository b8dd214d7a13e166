"""`shardpair golden`: every engine held to the numbers of nanoGPT itself."""

import msgspec
from rich.table import Table

from compare.commands.arguments import FixedExperiment, Hidden
from compare.commands.chosen_layout import Spread
from compare.execute.progress import Reporter
from compare.judge.ladder import rungs_of
from compare.present.tables import rung_cell
from compare.spec.experiment import (
    Experiment,
    revalidate,
)
from compare.studies.golden import EXPERIMENT, REFERENCE, Held, golden_cases, hold
from compare.terminal.console import print_json, results_console


class Golden(FixedExperiment, Spread, frozen=True, kw_only=True):
    """Hold every engine to what nanoGPT's own train.py computed: 30 steps in float64, to 1e-10.

    Engines that agree may all be wrong in the same way; this shows it. The experiment is the one that nanoGPT
    was run on (compare/experiments/golden.toml), with AdamW and again with SGD; only its layout is yours to
    choose.

    Try:
      shardpair golden
      shardpair golden --preset fsdp --devices 2 --engines jax-manual torch-manual
    """

    experiment: Hidden[str] = EXPERIMENT
    continue_: Hidden[str] = ""

    def __call__(self, default: Experiment) -> int:
        """Train and compare. Returns the exit code: 0 if every engine computes what nanoGPT did, else 1."""
        experiment = self.laid_out(msgspec.structs.replace(default, layout=self.layout))
        experiment = revalidate(experiment)
        engines, left_out = self.fitting(experiment)
        if self.dry_run:
            return self.show_plan(experiment, golden_cases(experiment, engines), left_out)
        held, _ = hold(
            experiment,
            engines,
            left_out=left_out,
            run_dir=self.run_dir,
            settings=self.settings(),
            reporter=Reporter(quiet=self.quiet),
        )
        print_held(held, as_json=self.json)
        return 0 if held.passed else 1


def print_held(held: Held, *, as_json: bool) -> None:
    """The worst error of every engine on every rung, and the verdict."""
    if as_json:
        print_json(held)
        return
    console = results_console()
    table = Table(title=f"Relative errors against {REFERENCE} ({held.provenance.commit[:7]})")
    table.add_column("rung")
    for verdict in held.verdicts:
        table.add_column(verdict.candidate, justify="right")
    for rung in rungs_of(held.verdicts):
        table.add_row(rung, *(rung_cell(verdict, rung) for verdict in held.verdicts))
    worst = [max((rung.error for rung in verdict.rungs), default=0.0) for verdict in held.verdicts]
    table.add_section()
    table.add_row("worst", *(f"{error:.1e}" for error in worst))
    console.print(table)
    for name, why in held.failures.items():
        console.print(f"{name} did not finish: {why}", style="red", soft_wrap=True)
    good = "bold green" if held.passed else "bold red"
    console.print(held.sentence(), style=good, soft_wrap=True)
