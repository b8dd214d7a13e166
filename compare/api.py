"""Paired experiments from Python: what `shardpair run`, `check` and `bench` do, for scripts and notebooks.

    from compare.api import experiment, run

    tiny = experiment("check", train={"max_iters": 5}, model={"n_layer": 2})
    result = run(tiny, engines=["jax-manual", "torch-manual"], preset="fsdp", devices=2)
    print(result.sentence())
    result["jax-manual"].loss                                      # an array, a number for each step
    result["torch-manual"].tensors("gradients")["embedding.token"]  # an array (V, C)

Each engine runs in processes of its own, as from the command line: neither JAX nor PyTorch is imported
here. `docs/notebook.py` is a worked example.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from compare.contract.record import Manifest, Record, read_record, read_tensors
from compare.contract.request import Rung
from compare.flags.arguments import Spec
from compare.judge.bench_rows import BenchRow, blocks
from compare.judge.comparison import Comparison, read_comparison
from compare.judge.timed_outcome import TimedOutcome
from compare.present.bench_words import in_one_line
from compare.present.report.render import PAGE, write_report
from compare.show.findings import Findings
from compare.show.pages import leave_page
from compare.spec.experiment import Experiment, ExperimentError, parse, revalidate
from compare.studies.bench import Bench
from compare.studies.check import Check
from compare.studies.nanogpt_config import load_experiment
from compare.studies.presets import settings_in
from compare.studies.registry import STUDIES
from compare.studies.run import Run
from compare.study import Study, findings_in

__all__ = ["Answer", "Race", "Result", "Training", "bench", "check", "experiment", "read", "run", "study"]

AnyCommand = TypeVar("AnyCommand", bound=Spec)
NOT_OPTIONS = {"experiment", "continue_", "dry_run", "json", "given", "written"}
"""Of the command line alone."""


class Training(Struct, frozen=True, kw_only=True):
    """One engine's finished run: its steps as arrays, its tensors by name."""

    name: str
    record: Record

    @property
    def manifest(self) -> Manifest:
        """Manifest of the run: how it was made, and what it cost beyond its steps."""
        return self.record.manifest

    @property
    def loss(self) -> np.ndarray:
        """Mean cross-entropy in nats before each step's update: float64 (steps,)."""
        return self._column("loss")

    @property
    def grad_norm(self) -> np.ndarray:
        """Global norm of the gradients before clipping: float64 (steps,)."""
        return self._column("grad_norm")

    @property
    def lr(self) -> np.ndarray:
        """Learning rate of each step: float64 (steps,)."""
        return self._column("lr")

    @property
    def step_time_ms(self) -> np.ndarray:
        """Wall time of each step, the first ones included: float64 (steps,)."""
        return self._column("step_time_ms")

    def tensors(self, rung: str) -> Mapping[str, np.ndarray]:
        """The tensors of one rung of the ladder, by canonical parameter name.

        Args:
            rung: batch (`inputs` and `targets`), initial_weights, gradients, first_weights, first_m,
                first_v or later_weights.

        Raises:
            ValueError: no such rung, or the run did not leave it.
        """
        if rung not in list(Rung):
            raise ValueError(f"{rung}: no such rung (there are {', '.join(Rung)})")
        found = read_tensors(self.record.folder, Rung(rung))
        if not found:
            raise ValueError(f"{self.name} left no {rung}: see --ladder and --keep_tensors")
        return found

    def _column(self, field: str) -> np.ndarray:
        return np.array([getattr(step, field) for step in self.record.steps])


class Result(Struct, frozen=True, kw_only=True):
    """A comparison with its records. Prints as its verdict; `result["jax-manual"]` is one engine's run."""

    comparison: Comparison
    """Verdicts with the error on every rung, costs, failures: what --json prints."""
    folder: Path
    """Where the records are; `read` reads them again."""
    trainings: dict[str, Training]
    """Every finished run by its case's name; the first is the reference."""

    @property
    def passed(self) -> bool:
        """True if every case finished, and agrees with the reference on every rung."""
        return self.comparison.passed

    @property
    def report(self) -> Path | None:
        """The page that `run` writes, to be opened in a browser; None where there is none."""
        page = self.folder / PAGE
        return page if page.is_file() else None

    def sentence(self) -> str:
        """The verdict in one line."""
        return self.comparison.sentence()

    def errors(self) -> dict[str, dict[str, float]]:
        """The relative error of every case but the reference on every rung: errors()[case][rung]."""
        return {
            verdict.candidate: {result.rung: result.error for result in verdict.rungs}
            for verdict in self.comparison.verdicts
        }

    def __getitem__(self, name: str) -> Training:
        """One case's run."""
        return self.trainings[name]

    def __iter__(self) -> Iterator[Training]:
        """Every finished run, the reference first."""
        return iter(self.trainings.values())

    def __repr__(self) -> str:
        """The verdict, as a notebook shows it."""
        return f"<{type(self).__name__} {self.folder}: {self.sentence()}>"


class Race(Struct, frozen=True, kw_only=True):
    """A bench: every single figure, and the rows of its table."""

    result: TimedOutcome
    folder: Path
    """Where outcome.json is; `shardpair report` shows it and writes its page."""

    @property
    def rows(self) -> dict[str, list[BenchRow]]:
        """Cases that do the same work, by block: medians over rounds, and ratios with their intervals."""
        return blocks(self.result)

    def sentence(self) -> str:
        """The least and the greatest ratio in one line."""
        return in_one_line(self.result)

    def __repr__(self) -> str:
        """The sentence, as a notebook shows it."""
        return f"<{type(self).__name__} {self.folder}: {self.sentence()}>"


class Answer(Struct, frozen=True, kw_only=True):
    """What a study found. Prints as its sentence."""

    outcome: TimedOutcome
    """Every single value that was measured."""
    findings: Findings
    """Tables, figures and sentences; `findings.value["rows"]` is what the tables are made of."""
    folder: Path
    """Where outcome.json is; `shardpair report` shows it and writes its page."""

    def __repr__(self) -> str:
        """The sentence, as a notebook shows it."""
        return f"<{type(self).__name__} {self.folder}: {self.findings.sentence}>"


def experiment(name: str | Path = "demo", **sections: Mapping[str, object]) -> Experiment:
    """A named experiment, a TOML file or one of nanoGPT's config files, with other values in some fields.

    Args:
        name: as on the command line.
        sections: fields by section: `train={"max_iters": 5}, model={"n_layer": 2}`.

    Raises:
        ExperimentError: no such experiment or field, or a value that cannot work.
    """
    fields = msgspec.to_builtins(load_experiment(str(name)))
    for section, values in sections.items():
        fields[section] = {**fields.get(section, {}), **values}
    return parse(msgspec.toml.encode(fields), origin=str(name))


def run(experiment: Experiment | str | Path = "demo", **options: Any) -> Result:
    """Train one experiment with several engines, compare, and write a report: `shardpair run`.

    Args:
        experiment: a name, a TOML file, or what `experiment` returned.
        options: the command's flags by their names: engines (the first is what the others are held against;
            all that can express the layout by default), preset and devices, ladder, keep_tensors (by default
            True, other than there), init_from, resume, platform, run_dir, timeout_s, cache_dir, quiet,
            jax_python, torch_python. See `shardpair run --help`.

    Raises:
        ExperimentError, EnvironmentMissing: before anything is started.
        EngineError: no engine finished. If only some did, `result.comparison.failures` says why.
    """
    command, default = _command(Run, experiment, {"keep_tensors": True, **options})
    comparison, folder = command.outcome(default)
    leave_page(partial(write_report, folder), as_json=True)
    return _result(comparison, folder)


def check(experiment: Experiment | str | Path = "check", **options: Any) -> Result:
    """Hold every engine and gradient synchronisation against one unsharded device: `shardpair check`.

    Args:
        experiment: as for `run`.
        options: engines, devices, init_from, platform, run_dir, timeout_s, cache_dir, quiet, jax_python,
            torch_python.

    Raises:
        ExperimentError, EnvironmentMissing, EngineError: as `run`.
    """
    command, default = _command(Check, experiment, options)
    return _result(*command.outcome(default))


def bench(experiment: Experiment | str | Path = "demo", **options: Any) -> Race:
    """Time engines, layouts and settings against each other in fresh processes: `shardpair bench`.

        race = bench("demo", engines=["torch-manual", "torch-library"], presets=["ddp"], devices=[2])
        race.rows["ddp-2"][1].wall_ratio.median  # torch-library over torch-manual

    Args:
        experiment: as for `run`.
        options: engines, presets, devices, sizes, variants, baseline, rounds, window, windows, anyway,
            platform, run_dir, timeout_s, cache_dir, quiet, jax_python, torch_python.

    Raises:
        ExperimentError: before anything is started.
        EnvironmentMissing: the machine is busy, or lacks what is asked for.
    """
    command, default = _command(Bench, experiment, options)
    result, folder = command.outcome(default)
    return Race(result=result, folder=folder)


def study(name: str, experiment: Experiment | str | Path = "demo", **options: Any) -> Answer:
    """Answer a question that is declared in compare/studies, such as "buckets": `shardpair NAME`.

        study("buckets", "demo", rounds=2).findings.sentence

    Args:
        name: the word of its command: a key of `compare.studies.registry.STUDIES`.
        experiment: as for `run`.
        options: the command's flags by their names.

    Raises:
        ExperimentError: no such study, or before anything is started.
        EnvironmentMissing: the machine is busy, or lacks what is asked for.
        EngineError: too little finished for an answer.
    """
    studies = {word: one for word, one in STUDIES.items() if issubclass(one, Study)}
    if name not in studies:
        raise ExperimentError(f"{name}: no such study (there are {', '.join(studies)})")
    command, default = _command(studies[name], experiment, options)
    outcome, folder = command.outcome(default)
    return Answer(outcome=outcome, folder=folder, findings=findings_in(command, outcome, folder))


def read(folder: str | Path) -> Result:
    """The result of a run that was made before, judged anew from its records: `shardpair report`.

    Raises:
        RecordError: the folder holds no comparison, a file is garbled, or nothing had finished.
    """
    comparison, _ = read_comparison(Path(folder))
    return _result(comparison, Path(folder))


def _result(comparison: Comparison, folder: Path) -> Result:
    trainings = {name: Training(name=name, record=read_record(folder / name)) for name in comparison.cases}
    return Result(comparison=comparison, folder=folder, trainings=trainings)


def _command(
    command: type[AnyCommand], experiment: Experiment | str | Path, options: Mapping[str, Any]
) -> tuple[AnyCommand, Experiment]:
    """The command as its command line would give it, and its experiment."""
    is_built = isinstance(experiment, Experiment)
    name, default = (
        ("notebook", revalidate(experiment))
        if is_built
        else (str(experiment), load_experiment(str(experiment)))
    )
    allowed = set(command.__struct_fields__) - set(Experiment.__struct_fields__) - NOT_OPTIONS
    if unknown := sorted(options.keys() - allowed):
        raise ExperimentError(f"{unknown[0]}: no such option (there are {', '.join(sorted(allowed))})")
    words = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
    written = settings_in(default.layout) if is_built else command.layout_written(name)
    said = {"given": list(options), "written": list(written)}
    try:
        return msgspec.convert(
            {"experiment": name, **msgspec.to_builtins(default), **words, **said}, command
        ), default
    except msgspec.ValidationError as error:
        raise ExperimentError(str(error)) from None
