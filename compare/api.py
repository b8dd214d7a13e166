"""The commands of `shardpair` as functions, for scripts and notebooks.

    from compare.api import experiment, run

    tiny = experiment("check", train={"max_iters": 5}, model={"n_layer": 2})
    result = run(tiny, engines=["jax-manual", "torch-manual"], preset="fsdp", devices=2)
    print(result.sentence())
    result["jax-manual"].loss                                      # an array, a number for each step
    result["torch-manual"].tensors("gradients")["embedding.token"]  # an array (V, C)

Each engine runs in its own processes, as from the command line. Neither JAX nor PyTorch is imported here.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from compare.commands.registry import STUDIES, read_study
from compare.contract.record import MANIFEST, Manifest, Record, read_record, read_tensors
from compare.contract.request import Rung
from compare.formats.nanogpt import load_experiment
from compare.judge.outcome import Outcome
from compare.run.study import PAGES, Study, findings_in, write_page_of
from compare.show.findings import Findings
from compare.spec.experiment import Experiment, ExperimentError, parse, revalidate

__all__ = ["Result", "Training", "check", "experiment", "read", "run", "study"]

NOT_OPTIONS = {"experiment", "continue_", "dry_run", "json", "given", "line"}
"""Fields that options cannot set."""


class Training(Struct, frozen=True, kw_only=True):
    """A finished run of one engine: its steps as arrays, its tensors by name."""

    name: str
    record: Record
    loss: np.ndarray
    """Mean cross-entropy in nats before each step's update, float64 (steps,), like the other curves."""
    grad_norm: np.ndarray
    """Global norm of the gradients before clipping."""
    lr: np.ndarray
    """Learning rate of each step."""
    step_time_ms: np.ndarray
    """Wall time of each step."""

    @property
    def manifest(self) -> Manifest:
        """Versions, devices, memory and times of the run."""
        return self.record.manifest

    def tensors(self, rung: str) -> Mapping[str, np.ndarray]:
        """Tensors of a rung of the ladder, such as gradients or later_weights, by canonical name.

        Raises:
            ValueError: no such rung, or the run did not record it.
        """
        if tensors := read_tensors(self.record.folder, Rung(rung)):
            return tensors
        raise ValueError(f"{self.name} has no {rung}: see --ladder and --keep_tensors")


class Result(Struct, frozen=True, kw_only=True):
    """The result of a study. `result["jax-manual"]` is one engine's run."""

    outcome: Outcome
    """Values, verdicts with the error on every rung, failures."""
    findings: Findings
    """Tables, figures and sentences; `findings.value` is the object that --json prints."""
    folder: Path
    """Folder of outcome.json, for `read`."""
    trainings: dict[str, Training]
    """Finished runs whose records were kept, by case."""

    @property
    def passed(self) -> bool:
        """Whether every case finished and passed."""
        return self.findings.passed

    @property
    def report(self) -> Path | None:
        """The HTML report of a run; None for other studies."""
        page = self.folder / PAGES["run"]
        return page if page.is_file() else None

    def sentence(self) -> str:
        """The result in one line."""
        return self.findings.sentence

    def errors(self) -> dict[str, dict[str, float]]:
        """Relative errors of every compared case on every rung: errors()[case][rung]."""
        verdicts = self.outcome.verdicts
        return {of.candidate: {result.rung: result.error for result in of.rungs} for of in verdicts}

    def __getitem__(self, name: str) -> Training:
        """The run of a case."""
        return self.trainings[name]

    def __iter__(self) -> Iterator[Training]:
        """Finished runs, the reference first."""
        return iter(self.trainings.values())

    def __repr__(self) -> str:
        """The folder and the sentence, for notebooks."""
        return f"<{type(self).__name__} {self.folder}: {self.sentence()}>"


def experiment(name: str | Path = "demo", **sections: Mapping[str, object]) -> Experiment:
    """A named experiment, a TOML file or one of nanoGPT's config files, with other values in some fields.

    Args:
        name: a name or file, as on the command line.
        sections: fields by section: `train={"max_iters": 5}, model={"n_layer": 2}`.

    Raises:
        ExperimentError: no such experiment or field, or a value that cannot work.
    """
    fields = msgspec.to_builtins(load_experiment(str(name)))
    for section, values in sections.items():
        fields[section] = {**fields.get(section, {}), **values}
    return parse(msgspec.toml.encode(fields), origin=str(name))


def run(experiment: Experiment | str | Path = "demo", **options: Any) -> Result:
    """`shardpair run` with a report. Tensors are kept unless keep_tensors=False. Raises as `study`."""
    return study("run", experiment, **{"keep_tensors": options.get("ladder", True), **options})


def check(experiment: Experiment | str | Path = "check", **options: Any) -> Result:
    """`shardpair check`. Raises as `study`."""
    return study("check", experiment, **options)


def study(name: str, experiment: Experiment | str | Path = "demo", **options: Any) -> Result:
    """`shardpair NAME`, such as "bench", with a page.

        study("bench", "demo", presets=["ddp"], devices=[2], rounds=2).findings.sentence

    Args:
        name: a key of `compare.commands.registry.STUDIES`.
        experiment: a name, a TOML file, or the result of `experiment`.
        options: the command's flags by name: see `shardpair NAME --help`.

    Raises:
        ExperimentError, EnvironmentMissing: before anything starts.
        EngineError: no case finished. If some did, `result.outcome.failures` has the causes.
    """
    if name not in STUDIES:
        raise ExperimentError(f"{name}: no such study (there are {', '.join(STUDIES)})")
    command = _command(STUDIES[name], experiment, options)
    outcome, folder = command.run()
    write_page_of(type(command), outcome, folder)
    return _result(command, outcome, folder)


def read(folder: str | Path) -> Result:
    """The result of an earlier study. Raises RecordError: there is none, or it is damaged."""
    command, outcome = read_study(Path(folder))
    return _result(command, outcome, Path(folder))


def _result(command: Any, outcome: Outcome, folder: Path) -> Result:
    trainings = {}
    for name in outcome.finished:
        if (folder / name / MANIFEST).is_file():
            record = read_record(folder / name)
            curves = {
                curve: np.array([getattr(step, curve) for step in record.steps])
                for curve in ("loss", "grad_norm", "lr", "step_time_ms")
            }
            trainings[name] = Training(name=name, record=record, **curves)
    found = findings_in(command, outcome, folder)
    return Result(outcome=outcome, findings=found, folder=folder, trainings=trainings)


def _command(command: type[Study], experiment: Experiment | str | Path, options: Mapping[str, Any]) -> Study:
    """The study with these options."""
    if isinstance(experiment, Experiment):
        name, default = "notebook", revalidate(experiment)
    else:
        name = str(experiment)
        default = command.default_experiment(name)
    allowed = set(command.__struct_fields__) - set(Experiment.__struct_fields__) - NOT_OPTIONS
    if unknown := sorted(options.keys() - allowed):
        raise ExperimentError(f"{unknown[0]}: no such option (there are {', '.join(sorted(allowed))})")
    words = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
    said = {"experiment": name, "given": list(options)}
    try:
        return msgspec.convert({**msgspec.to_builtins(default), **words, **said}, command)
    except msgspec.ValidationError as error:
        raise ExperimentError(str(error)) from None
