"""`shardpair faults`: plant every known mistake, and show which rung of the ladder catches it."""

import shutil

from rich.table import Table

from compare.commands.arguments import Spec, StudiedName, chosen_engines
from compare.present.tables import print_faults
from compare.spec.experiment import Experiment, ExperimentError, edited
from compare.studies.cases import Case
from compare.studies.faults import FAULTS, caught_as_expected, fault_cases
from compare.studies.harness_faults import PAIR, SINGLE, Caught, plant_all
from compare.studies.presets import spread
from compare.terminal.console import print_json, results_console

DEVICES = 4


class Faults(Spec, frozen=True, kw_only=True):
    """Check the checker: plant each known mistake in each engine; the ladder must turn red at the right rung.

    Try:
      shardpair faults
      shardpair faults --engines torch-manual --names dropped_all_reduce sum_for_mean
      shardpair faults --harness
    """

    engines: tuple[StudiedName, ...] = ()
    """Engines to plant faults in. Default: all."""
    names: tuple[str, ...] = ()
    """Which faults. Default: all."""
    devices: int | None = None
    """Devices of data parallelism; faults of other layouts have devices of their own. Default: 4."""
    harness: bool = False
    """Plant faults of the harness instead: train the first two engines, damage copies of their records,
    mostly both alike, and hold them against each other; every one must turn red."""

    def __call__(self, default: Experiment) -> int:
        """Plant them. Returns the exit code: 0 if every fault was caught at its rung, else 1."""
        self.refuse_layout("every fault has a layout of its own")
        experiment = self.resolved(is_spread=False)
        devices = DEVICES if self.devices is None else self.devices
        self.require_nothing_else(default)
        self.refuse_init_from("faults are measured with the seed's weights")
        engines = chosen_engines(self.engines)
        if self.harness:
            return self._of_harness(experiment, engines, devices)
        if self.devices is not None and self.names and self._have_layouts():
            raise ExperimentError(
                f"--devices {self.devices} has no effect on {', '.join(self.names)}, which show in a "
                f"layout of their own: leave it out"
            )
        cases = fault_cases(experiment, engines, names=list(self.names), devices=devices)
        if self.dry_run:
            return self.show_plan(experiment, cases)
        comparison, _ = self.compare("faults", experiment, cases)
        print_faults(comparison, as_json=self.json)
        return 0 if caught_as_expected(comparison) else 1

    def _have_layouts(self) -> bool:
        """True if every chosen fault shows in a layout of its own."""
        return all(name in FAULTS and FAULTS[name].preset for name in self.names)

    def _of_harness(self, experiment: Experiment, engines: list[str], devices: int) -> int:
        if self.names:
            raise ExperimentError(f"--names {self.names[0]} has no effect with --harness: leave it out")
        if len(engines) < len(PAIR):
            raise ExperimentError("--harness holds two engines against each other: name two, or none")
        if not experiment.train.eval_interval:  # evaluations are damaged, too
            experiment = edited(experiment, {"train": {"eval_interval": 2, "eval_iters": 1}})
        sharded = spread(experiment, "ddp", devices)
        cases = [Case(name=n, engine=e, experiment=sharded) for n, e in zip(PAIR, engines, strict=False)]
        cases.append(Case(name=SINGLE, engine=engines[1], experiment=spread(experiment, "single")))
        if self.dry_run:
            return self.show_plan(experiment, cases)
        comparison, folder = self.compare("faults", experiment, cases)
        if not comparison.is_complete:
            raise ExperimentError(comparison.sentence())
        scratch = folder / "planted"
        shutil.rmtree(scratch, ignore_errors=True)  # of a run that is continued
        caught = plant_all(folder, scratch)
        _print_caught(caught, as_json=self.json)
        return 0 if all(one.is_right for one in caught) else 1


def _print_caught(caught: list[Caught], *, as_json: bool) -> None:
    if as_json:
        print_json(caught)
        return
    table = Table(title="Records that are not what was asked for, and what the harness says of each")
    for column in ("fault", "records", "expected", "caught at", "verdict"):
        table.add_column(column)
    for one in caught:
        both = "both" if one.both else "one"
        table.add_row(one.fault, both, one.expected or "passes", one.rung or "nothing", one.sentence)
    console = results_console()
    console.print(table)
    wrong = [one.fault for one in caught if not one.is_right]
    planted = len(caught) - 1  # the first is the control
    sentence = f"{planted} faults of the harness are red, and the control passes"
    console.print(
        f"WRONG: {', '.join(wrong)}" if wrong else sentence, style="bold red" if wrong else "bold green"
    )
