"""Paired experiments from Python: what the commands of `shardpair` do, for scripts and notebooks.

    from compare.api import experiment, run

    tiny = experiment("check", train={"max_iters": 5}, model={"n_layer": 2})
    result = run(tiny, engines=["jax-manual", "torch-manual"], preset="fsdp", devices=2)
    print(result.sentence())
    result["jax-manual"].loss                                      # an array, a number for each step
    result["torch-manual"].tensors("gradients")["embedding.token"]  # an array (V, C)

Each engine runs in processes of its own, as from the command line: neither JAX nor PyTorch is imported
here.
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
from compare.formats.nanogpt_config import load_experiment
from compare.judge.outcome import Outcome
from compare.run.study import PAGES, Study, findings_in, write_page_of
from compare.show.findings import Findings
from compare.spec.experiment import Experiment, ExperimentError, parse, revalidate

__all__ = ["Result", "Training", "check", "experiment", "read", "run", "study"]

NOT_OPTIONS = {"experiment", "continue_", "dry_run", "json", "given", "line"}
"""Of the command line alone."""


class Training(Struct, frozen=True, kw_only=True):
    """One engine's finished run: its steps as arrays, its tensors by name."""

    name: str
    record: Record
    loss: np.ndarray
    """Mean cross-entropy in nats before each step's update: float64 (steps,), as the other curves."""
    grad_norm: np.ndarray
    """Global norm of the gradients before clipping."""
    lr: np.ndarray
    """Learning rate of each step."""
    step_time_ms: np.ndarray
    """Wall time of each step, the first ones included."""

    @property
    def manifest(self) -> Manifest:
        """How it was made, and what it cost beyond its steps."""
        return self.record.manifest

    def tensors(self, rung: str) -> Mapping[str, np.ndarray]:
        """The tensors of a rung of the ladder, such as gradients or later_weights, by canonical name.

        Raises:
            ValueError: no such rung, or the run did not leave it.
        """
        if tensors := read_tensors(self.record.folder, Rung(rung)):
            return tensors
        raise ValueError(f"{self.name} left no {rung}: see --ladder and --keep_tensors")


class Result(Struct, frozen=True, kw_only=True):
    """What a study found. Prints as its sentence; `result["jax-manual"]` is one engine's run."""

    outcome: Outcome
    """Every value that was kept, verdicts with the error on every rung, failures."""
    findings: Findings
    """Tables, figures and sentences; `findings.value` is what --json prints."""
    folder: Path
    """Where outcome.json is; `read` reads it again."""
    trainings: dict[str, Training]
    """Every finished run whose record was kept, by its case's name."""

    @property
    def passed(self) -> bool:
        """True if every case finished, and all is as it should be."""
        return self.findings.passed

    @property
    def report(self) -> Path | None:
        """The page that `run` writes, to be opened in a browser; None where there is none."""
        page = self.folder / PAGES["run"]
        return page if page.is_file() else None

    def sentence(self) -> str:
        """The outcome in one line."""
        return self.findings.sentence

    def errors(self) -> dict[str, dict[str, float]]:
        """The relative error of every case but references on every rung: errors()[case][rung]."""
        verdicts = self.outcome.verdicts
        return {of.candidate: {result.rung: result.error for result in of.rungs} for of in verdicts}

    def __getitem__(self, name: str) -> Training:
        """One case's run."""
        return self.trainings[name]

    def __iter__(self) -> Iterator[Training]:
        """Every finished run, the reference first."""
        return iter(self.trainings.values())

    def __repr__(self) -> str:
        """The sentence, as a notebook shows it."""
        return f"<{type(self).__name__} {self.folder}: {self.sentence()}>"


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
    """`shardpair run`, with a report; tensors are kept unless keep_tensors=False. Raises as `study`."""
    return study("run", experiment, **{"keep_tensors": options.get("ladder", True), **options})


def check(experiment: Experiment | str | Path = "check", **options: Any) -> Result:
    """`shardpair check`. Raises as `study`."""
    return study("check", experiment, **options)


def study(name: str, experiment: Experiment | str | Path = "demo", **options: Any) -> Result:
    """Answer a question that is declared in compare/commands, such as "bench": `shardpair NAME`.

        study("bench", "demo", presets=["ddp"], devices=[2], rounds=2).findings.sentence

    Args:
        name: the word of its command: a key of `compare.commands.registry.STUDIES`.
        experiment: a name, a TOML file, or what `experiment` returned.
        options: the command's flags by their names: see `shardpair NAME --help`.

    Raises:
        ExperimentError, EnvironmentMissing: before anything is started.
        EngineError: nothing finished. If only some did, `result.outcome.failures` says why.
    """
    if name not in STUDIES:
        raise ExperimentError(f"{name}: no such study (there are {', '.join(STUDIES)})")
    command = _command(STUDIES[name], experiment, options)
    outcome, folder = command.run()
    write_page_of(type(command), outcome, folder)
    return _result(command, outcome, folder)


def read(folder: str | Path) -> Result:
    """The result of a study that was made before. Raises RecordError: there is none, or it is garbled."""
    command, outcome = read_study(Path(folder))
    return _result(command, outcome, Path(folder))


def _result(command: Any, outcome: Outcome, folder: Path) -> Result:
    names = [name for name in outcome.finished if (folder / name / MANIFEST).is_file()]
    return Result(
        outcome=outcome,
        findings=findings_in(command, outcome, folder),
        folder=folder,
        trainings={name: _training(name, read_record(folder / name)) for name in names},
    )


def _training(name: str, record: Record) -> Training:
    curves = ("loss", "grad_norm", "lr", "step_time_ms")
    arrays = {curve: np.array([getattr(step, curve) for step in record.steps]) for curve in curves}
    return Training(name=name, record=record, **arrays)


def _command(command: type[Study], experiment: Experiment | str | Path, options: Mapping[str, Any]) -> Study:
    """The command as its command line would give it."""
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
