"""`shardpair sweep`: one experiment under several strategies, or over several numbers of devices."""

import shutil
from pathlib import Path
from typing import ClassVar

import msgspec

from compare.contract.record import Record, read_record
from compare.execute.here import here_and_now
from compare.execute.launch import EngineError, EnvironmentMissing, require_devices
from compare.execute.paths import create_run_dir
from compare.execute.progress import Reporter
from compare.flags.arguments import EngineName, chosen_engines
from compare.host.disk import write_atomically
from compare.judge.closed_forms.flops import model_flops_per_token
from compare.judge.comparison import COMPARISON, Comparison, differences, read_comparison, read_saved
from compare.judge.outcome import read_outcome, save
from compare.numerics.parameters import parameter_count
from compare.present.report.repeat import EXPERIMENT
from compare.present.report.tables import manifest_table
from compare.present.sweep import headline, layout_table, own_experiment, repeat_command, sweep_table, worth
from compare.present.sweep_figures import figures_of, losses
from compare.show.findings import Findings
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError, edited, to_toml
from compare.studies.cases import Case, Interrupted, Settings
from compare.studies.paired_run import compare_cases, continue_cases
from compare.studies.presets import (
    CLASSIC,
    PRESETS,
    check_names,
)
from compare.studies.sweep_outcome import Batch, Scaling, SweepOutcome, with_rows
from compare.study import Study

DEVICES, SCALED = (2,), (1, 2, 4)
NO_FILES = ("stdlib", "synthetic")


class Sweep(Study[SweepOutcome], frozen=True, kw_only=True):
    """Train one experiment under several strategies: compare loss, time, memory, throughput, communication.

    Every strategy is held to one unsharded device, rung by rung. Times are of one process for each, one after
    another: an order of magnitude, and no ranking. What an engine refuses is left out by name.

    Try:
      shardpair sweep demo --engines torch-manual
      shardpair sweep demo --presets ddp fsdp tp_sp --devices 4 --train.max_iters 30
      shardpair sweep demo --scaling strong --presets ddp fsdp --engines jax-manual torch-manual
    """

    engines: tuple[EngineName, ...] = ()
    """Which engines. Default: all of the grid."""
    presets: tuple[str, ...] = ()
    """Strategies, by the names of `shardpair list`. Default: ddp, zero1, zero2, fsdp, tp."""
    devices: tuple[int, ...] = ()
    """How many devices each strategy is spread over; several with --scaling. Default: 2, in scaling 1 2 4."""
    scaling: Scaling = "none"
    """Over growing numbers of devices: strong keeps the batch, weak gives each device the experiment's batch.
    Efficiency is throughput per device, over that of the smallest number."""
    ladder: bool = True
    """Compare gradients, weights and moments, at any size; --no_ladder compares losses and norms alone."""

    brief = "strategies side by side, or over growing numbers of devices"
    group = "Train and compare"
    own_weights = ""
    kept: ClassVar = SweepOutcome
    shows_unfinished = False

    @property
    def gives_layouts(self) -> bool:
        """True: --presets."""
        return True

    def planned(self, default: Experiment) -> SweepOutcome:
        """The sweep that the flags ask for. Raises ExperimentError."""
        check_names("--presets", "preset", self.presets, PRESETS)
        planned = SweepOutcome(
            study=self.command,
            name=self.title,
            experiment=_with_absolute_source(self.asked()),
            platform=self.platform,
            strategies=list(self.presets or CLASSIC),
            engines=chosen_engines(self.engines),
            devices=self._devices(),
            scaling=self.scaling,
            ladder=self.ladder,
            init_from=str(Path(self.init_from).absolute()) if self.init_from else "",
            said=self.said,
        )
        left_out = (batch.left_out for batch in planned.batches())
        return msgspec.structs.replace(
            planned, left_out={name: why for one in left_out for name, why in one.items()}
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

    def cases_of(self, planned: SweepOutcome) -> list[Case]:
        """Every case of every batch."""
        return [case for batch in planned.batches() for case in batch.cases]

    def begun(self, planned: SweepOutcome) -> tuple[SweepOutcome, Path]:
        """Train every batch, in a new folder."""
        for case in self.cases_of(planned):
            require_devices(case.experiment, planned.platform)  # before the first batch has cost an hour
        planned = msgspec.structs.replace(planned, circumstances=here_and_now())
        folder = create_run_dir(planned.name, self.run_dir)
        save(planned, folder)  # for --continue, whatever ends it
        return self._trained(planned, folder), folder

    def continued(self, folder: Path) -> SweepOutcome:
        """Train what is missing."""
        return self._trained(read_outcome(folder, SweepOutcome), folder)

    def _trained(self, planned: SweepOutcome, folder: Path) -> SweepOutcome:
        settings = msgspec.structs.replace(
            self.settings(), platform=planned.platform, ladder=planned.ladder, init_from=planned.init_from
        )
        try:
            for batch in planned.batches():
                self._train(planned, batch, folder, settings)
        except Interrupted:
            raise Interrupted(
                f"interrupted; every process was ended. `{planned.how_to_go_on(folder)}` runs the rest",
                folder,
            ) from None
        return with_rows(planned, *_read(folder))

    def _train(self, planned: SweepOutcome, batch: Batch, folder: Path, settings: Settings) -> None:
        """One batch, a comparison like `run`'s. If nothing of it finishes, that does not end the others.

        Raises:
            ExperimentError, EnvironmentMissing: before anything of it starts.
            EngineError: nothing of the only batch finished.
        """
        place, reporter = folder / batch.name, Reporter(quiet=self.quiet)
        try:
            if (place / COMPARISON).is_file():
                continue_cases(place, settings=settings, reporter=reporter, needs_first=False)
                return
            compare_cases(
                planned.name,
                batch.experiment,
                batch.cases,
                command="run",
                run_dir=str(place),
                settings=settings,
                reporter=reporter,
                needs_first=False,
                left_out=batch.left_out,
            )
        except (ExperimentError, EnvironmentMissing):
            if not self.continue_ and not any(path.is_dir() for path in folder.iterdir()):
                shutil.rmtree(folder)  # nothing of worth is in it
            raise
        except EngineError:
            if len(planned.devices) == 1 or planned.scaling == "strong":
                raise

    @classmethod
    def judged_again(cls, outcome: SweepOutcome, folder: Path) -> tuple[SweepOutcome, list[str]]:
        """Every batch as its records give it now."""
        saved, records = _read(folder)
        anew = {name: read_comparison(folder / name)[0] if one.cases else one for name, one in saved.items()}
        moved = [line for name, one in saved.items() for line in differences(one, anew[name])]
        return with_rows(outcome, anew, records), moved

    @classmethod
    def shown(cls, outcome: SweepOutcome, folder: Path, *, picture: Path | None, as_json: bool) -> int:
        """Save it, print it, and leave its page, and the experiment beside that."""
        save(outcome, folder)
        write_atomically(folder / EXPERIMENT, to_toml(own_experiment(outcome)).encode())
        return super().shown(outcome, folder, picture=picture, as_json=as_json)

    @classmethod
    def findings(cls, outcome: SweepOutcome, folder: Path) -> Findings:
        """A row for each strategy on each engine; losses, step times, memory, or throughput over devices."""
        comparisons, records = _read(folder)
        undone = [name for one in comparisons.values() for name in one.not_run]
        runs = [record for found in records.values() for record in reversed(found)]
        by_engine = {record.manifest.engine: record for record in runs}
        experiment, circumstances = outcome.experiment, outcome.circumstances
        title = headline(outcome)
        return Findings(
            title=f"{outcome.name}: {title[0].lower()}{title[1:]}",
            sentence=outcome.verdict,
            value=outcome,
            passed=outcome.passed,
            about=[
                f"{parameter_count(experiment.model):,} parameters, {experiment.train.max_iters} steps, "
                f"{experiment.precision.dtype}, {model_flops_per_token(experiment):.3g} floating-point "
                f"operations a token. {circumstances.machine.system}, {outcome.device_kind}; "
                f"{', '.join(f'{name} {version}' for name, version in circumstances.versions.items())}; "
                f"{circumstances.made_by}; {circumstances.created_utc[:16].replace('T', ' ')} UTC.",
                worth(outcome),
            ],
            missing={
                **{name: f"did not finish: {why}" for name, why in outcome.failures.items()},
                **dict.fromkeys(undone, "did not run"),
            },
            continuation=outcome.how_to_go_on(folder.absolute()),
            tables=[sweep_table(outcome)],
            details=[
                layout_table(comparisons, records, outcome.platform),
                *(
                    msgspec.structs.replace(
                        manifest_table(name, record), name=f"{name}: {ENGINES[name].decides}"
                    )
                    for name, record in by_engine.items()
                ),
            ],
            figures=figures_of(outcome, by_engine),
            drawn=lambda: losses(outcome, comparisons, records),
            left_out=outcome.left_out,
            spec=to_toml(own_experiment(outcome)),
            command=repeat_command(outcome),
            source=circumstances.words,
        )


def _read(folder: Path) -> tuple[dict[str, Comparison], dict[str, list[Record]]]:
    """The comparison of every batch that has begun, as it was saved, and its records; by batch."""
    begun = sorted(folder.glob(f"batch-*/{COMPARISON}"), key=lambda path: int(path.parent.name.split("-")[1]))
    saved = {path.parent.name: read_saved(path.parent) for path in begun}
    return saved, {
        name: [read_record(folder / name / case) for case in one.cases] for name, one in saved.items()
    }


def _with_absolute_source(experiment: Experiment) -> Experiment:
    """The experiment with data that is found from the folder of the page, too."""
    source = experiment.data.source
    if source in NO_FILES:
        return experiment
    return edited(experiment, {"data": {"source": str(Path(source).absolute())}})
