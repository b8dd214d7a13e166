"""`shardpair sweep`: one experiment under several strategies, or over several numbers of devices."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from compare.commands.arguments import EngineName, Spec, chosen_engines
from compare.contract.record import Record, read_record
from compare.execute.launch import EngineError, EnvironmentMissing, require_devices
from compare.execute.paths import create_run_dir
from compare.host.disk import write_atomically
from compare.judge.comparison import Comparison, read_saved
from compare.present.report.repeat import EXPERIMENT
from compare.present.sweep import PAGE, findings_of_sweep
from compare.present.tables import by_reason
from compare.show.page import show as show_findings
from compare.spec.experiment import Experiment, ExperimentError, edited
from compare.studies.cases import Settings
from compare.studies.presets import CLASSIC, PRESETS, check_names
from compare.studies.sweep import Batch, Scaling, SweepPlan, sweep_batches
from compare.studies.sweep_outcome import SweepOutcome, outcome_of, read_outcome, save_outcome
from compare.terminal.console import errors_console

DEVICES, SCALED = (2,), (1, 2, 4)
NO_FILES = ("stdlib", "synthetic")


class Sweep(Spec, frozen=True, kw_only=True):
    """Train one experiment under several strategies: compare loss, time, memory, throughput, communication.

    Every strategy is held to one unsharded device, rung by rung. Times are of one process for each, one after
    another: an order of magnitude, and no ranking. What an engine refuses is left out by name.

    Try:
      shardpair sweep demo --engines torch-manual
      shardpair sweep demo --presets ddp fsdp tp_sp --devices 4 --train.max_iters 30
      shardpair sweep demo --scaling strong --presets ddp fsdp --engines jax-manual torch-manual
    """

    engines: tuple[EngineName, ...] = ()
    """Which engines. Default: all."""
    presets: tuple[str, ...] = ()
    """Strategies, by the names of `shardpair list`. Default: ddp, zero1, zero2, fsdp, tp."""
    devices: tuple[int, ...] = ()
    """How many devices each strategy is spread over; several with --scaling. Default: 2, in scaling 1 2 4."""
    scaling: Scaling = "none"
    """Over growing numbers of devices: strong keeps the batch, weak gives each device the experiment's batch.
    Efficiency is throughput per device, over that of the smallest number."""
    ladder: bool = True
    """Compare gradients, weights and moments, at any size; --no_ladder compares losses and norms alone."""

    def __call__(self, default: Experiment) -> int:
        """Run it. Returns the exit code: 0 if all strategies agree, else 1."""
        plan = self._continued(default) if self.continue_ else self._planned(default)
        batches = sweep_batches(plan)
        left_out = {name: why for batch in batches for name, why in batch.left_out.items()}
        if self.dry_run:
            cases = [case for batch in batches for case in batch.cases]
            return self.show_plan(plan.experiment, cases, left_out)
        if not self.quiet:
            for why, names in by_reason(left_out).items():
                errors_console().print(f"left out: {', '.join(names)}: {why}", style="yellow")
        comparisons, folder = self._compared_all(plan, batches)
        return 0 if show(plan, comparisons, folder, as_json=self.json).passed else 1

    def _planned(self, default: Experiment) -> SweepPlan:
        """The sweep that the flags ask for."""
        check_names("--presets", "preset", self.presets, PRESETS)
        return SweepPlan(
            name=Path(self.experiment).stem,
            experiment=_with_absolute_source(self.resolved(is_spread=False)),
            strategies=list(self.presets or CLASSIC),
            engines=chosen_engines(self.engines),
            devices=self._devices(),
            scaling=self.scaling,
            platform=self.platform,
            ladder=self.ladder,
            said=self.said,
            init_from=str(Path(self.init_from).absolute()) if self.init_from else "",
        )

    def _devices(self) -> list[int]:
        given = self.devices or (DEVICES if self.scaling == "none" else SCALED)
        for devices in given:
            if devices < 1:
                raise ExperimentError(f"--devices {devices} must be at least 1")
        if sorted(set(given)) != list(given):
            raise ExperimentError(f"--devices {' '.join(map(str, given))}: give each number once, rising")
        if self.scaling == "none" and len(given) > 1:
            raise ExperimentError(
                f"--devices {' '.join(map(str, given))}: give one number, or say what stays equal with "
                f"--scaling strong (the batch) or --scaling weak (each device's share of it)"
            )
        if self.scaling != "none" and len(given) == 1:
            raise ExperimentError(f"--scaling {self.scaling} --devices {given[0]}: give two numbers or more")
        return list(given)

    def _continued(self, default: Experiment) -> SweepPlan:
        """The sweep that --continue goes on with."""
        scaling = "" if self.scaling == "none" else self.scaling
        self.require_nothing_else(
            default, engines=self.engines, presets=self.presets, devices=self.devices, scaling=scaling
        )
        return read_outcome(Path(self.continue_)).plan

    def _compared_all(self, plan: SweepPlan, batches: list[Batch]) -> tuple[dict[str, Comparison], Path]:
        """Train what is missing and compare; nothing is printed on stdout."""
        settings = msgspec.structs.replace(
            self.settings(), platform=plan.platform, ladder=plan.ladder, init_from=plan.init_from
        )
        for batch in batches:
            for case in batch.cases:
                require_devices(case.experiment, plan.platform)  # before the first batch has cost an hour
        folder = self._folder(plan)
        comparisons: dict[str, Comparison] = {}
        for batch in batches:
            comparisons[batch.name] = self._compared(plan, batch, folder, settings)
        return comparisons, folder

    def _folder(self, plan: SweepPlan) -> Path:
        if self.continue_:
            return Path(self.continue_)
        folder = create_run_dir(f"sweep-{plan.name}", self.run_dir)
        save_outcome(SweepOutcome(plan=plan), folder)  # for --continue, whatever ends it
        return folder

    def _compared(self, plan: SweepPlan, batch: Batch, folder: Path, settings: Settings) -> Comparison:
        """One batch's comparison. If nothing of it finishes, that does not end the others.

        Raises:
            ExperimentError, EnvironmentMissing: before anything of it starts.
            EngineError: nothing of the only batch finished.
        """
        try:
            return self.compare(
                f"sweep-{plan.name}",
                batch.experiment,
                batch.cases,
                run_dir=str(folder / batch.name),
                settings=settings,
                needs_first=False,
                left_out=batch.left_out,
            )[0]
        except (ExperimentError, EnvironmentMissing):
            if not self.continue_ and not any(path.is_dir() for path in folder.iterdir()):
                shutil.rmtree(folder)  # nothing of worth is in it
            raise
        except EngineError:
            if len(plan.devices) == 1 or plan.scaling == "strong":
                raise
            return read_saved(folder / batch.name)


def show(
    plan: SweepPlan, comparisons: Mapping[str, Comparison], folder: Path, *, as_json: bool
) -> SweepOutcome:
    """Put the outcome of all batches together from their records, save and print it, and leave its page."""
    records: dict[str, list[Record]] = {
        name: [read_record(folder / name / case) for case in comparison.cases]
        for name, comparison in comparisons.items()
    }
    outcome = outcome_of(plan, comparisons, records)
    save_outcome(outcome, folder)
    found = findings_of_sweep(outcome, comparisons, records, folder)
    write_atomically(folder / EXPERIMENT, found.spec.encode())
    show_findings(found, folder, page=PAGE, picture=None, as_json=as_json)
    return outcome


def _with_absolute_source(experiment: Experiment) -> Experiment:
    """The experiment with data that is found from the folder of the page, too."""
    source = experiment.data.source
    if source in NO_FILES:
        return experiment
    return edited(experiment, {"data": {"source": str(Path(source).absolute())}})
