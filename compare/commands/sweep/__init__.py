"""`shardpair sweep`: one experiment under several strategies and settings, side by side.

A strategy is a preset. Each is compared with one unsharded device that has its batch and its settings.
"""

from pathlib import Path

import msgspec

from compare.commands.sweep.results import CSV, csv_of, loss_figures, means_over_seeds, rows_of, tables_of
from compare.execute.cpu_load import warn_of_load
from compare.execute.launch import require_devices
from compare.flags import EngineName, PresetNames, chosen_engines
from compare.judge.outcome import Grid, Outcome, read_run
from compare.numerics.parameters import parameter_count
from compare.run.study import Study
from compare.setup.fitting import require_memory
from compare.setup.grid import against_one_device, vary
from compare.setup.presets import CLASSIC, PRESETS, check_names, check_presets
from compare.show.findings import Findings, verdict_findings
from compare.spec.engines.registry import REFERENCE
from compare.spec.experiment import Experiment, ExperimentError
from compare.system.disk import write_atomically
from compare.theory.flops import model_flops_per_token


class Sweep(Study, frozen=True, kw_only=True):
    """Train one experiment under several layouts: compare loss, time, memory, throughput, communication.

    Every layout is compared with one unsharded device, rung by rung. Each is timed once, in one process: do
    not rank layouts by it, use `bench`. Layouts that an engine rejects are named and skipped. Settings with
    several values of train.seed have means and standard deviations. sweep.csv has a row for each case.

    Try:
      shardpair sweep demo --engines torch-manual
      shardpair sweep demo --presets single --variants precision.dtype=bfloat16
      shardpair sweep demo --presets ddp --variants train.seed=1 train.seed=2
    """

    engines: tuple[EngineName, ...] = ()
    """Engines. Default: all except peers."""
    presets: PresetNames = CLASSIC
    devices: int = 2
    """Devices of each strategy."""
    variants: tuple[str, ...] = ()
    """Settings in which each strategy is trained once more, such as precision.dtype=bfloat16 or
    train.seed=1,layout.remat=full."""
    ladder: bool = True
    """Compare gradients, weights and moments, at any size. --no_ladder compares losses and norms only."""

    keeps_records = True

    def cases(self, experiment: Experiment) -> Grid:
        """Every strategy and setting on every engine. Raises ExperimentError."""
        check_names("--presets", "preset", self.presets, PRESETS)
        if self.devices < 1:
            raise ExperimentError(f"--devices {self.devices} must be at least 1")
        over = {name: 1 if name == "single" else self.devices for name in self.presets}
        wide = [(name, devices) for name, devices in over.items() if name != "single"]
        check_presets(experiment.layout, wide, self.layout_flags)
        layouts = {f"{name}.{devices}": (name, devices) for name, devices in over.items()}
        rows, left_out = vary(experiment, layouts, self.variants, flags=self.layout_flags, skips=True)
        for coordinates, sharded in list(rows):
            try:
                require_devices(sharded, self.platform)
                require_memory(REFERENCE, sharded, platform=self.platform)
            except ExperimentError as error:
                left_out[", ".join(coordinates.values())] = str(error)
                rows.remove((coordinates, sharded))
        as_presets = "schedule" not in self.layout_flags
        engines = chosen_engines(self.engines)
        cases, refused = against_one_device(engines, rows, as_presets=as_presets, ladder=self.ladder)
        # One device of the reference's engine is the reference.
        kept = {
            name: case
            for name, case in cases.items()
            if not case.against or case.request != cases[case.against].request
        }
        return kept, left_out | refused

    def end(self, outcome: Outcome, folder: Path) -> Outcome:
        """Write sweep.csv."""
        write_atomically(folder / CSV, csv_of(outcome).encode())
        return outcome

    @classmethod
    def page(cls, outcome: Outcome, folder: Path) -> Findings:
        """The tables, and the loss curves of each setting."""
        figures = loss_figures(outcome, read_run(folder)[1])
        return msgspec.structs.replace(cls.findings(outcome, folder), figures=figures)

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """A row for each strategy on each engine, and its mean over seeds."""
        rows, seeds, experiment = rows_of(outcome), means_over_seeds(outcome), outcome.experiment
        return verdict_findings(
            outcome,
            title=f"{outcome.name}: {len(rows)} rows",
            about=[
                f"{parameter_count(experiment.model):,} parameters, {experiment.train.max_iters} steps, "
                f"{experiment.precision.dtype}, {model_flops_per_token(experiment):.3g} floating-point "
                f"operations a token. Each is timed once, in one process: do not rank strategies by it, use "
                f"`bench`. On a CPU all devices share its cores.",
            ],
            tables=tables_of(rows, seeds),
            warnings=warn_of_load(outcome),
            values={"rows": rows, "seeds": seeds},
        )
