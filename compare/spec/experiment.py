"""Experiments in TOML: one table per section (`compare.spec.sections`). Unknown keys are errors."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from compare.spec.checks import ExperimentError, check
from compare.spec.sections import (
    Checkpoints,
    Data,
    Experiment,
    Layout,
    Model,
    Optimizer,
    Precision,
    Train,
)
from compare.system.disk import why_not_readable

__all__ = ["Checkpoints", "Data", "Layout", "Model", "Optimizer", "Precision", "Train"]
"""Names of `compare.spec.sections` that are imported from here."""

MAX_CPU_DEVICES = 64  # virtual devices share the cores; past this a run only measures the scheduler
MAX_FILE_BYTES = 16_384  # Python's TOML reader takes minutes for 100 kB of dots


def named_experiments() -> dict[str, Path]:
    """Files of the experiments that ship with the package, by name."""
    folder = Path(__file__).parent.parent / "experiments"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load(name_or_path: str) -> Experiment:
    """Read an experiment: a name that ships with the package, or a TOML file. Raises ExperimentError."""
    known = named_experiments()
    path = known.get(name_or_path, Path(name_or_path))
    if wrong := why_not_readable(path):
        wrong = ": no such file or named experiment" if wrong == "does not exist" else f" {wrong}"
        raise ExperimentError(f"{name_or_path}{wrong} (named: {', '.join(known)})")
    with path.open("rb") as file:
        return parse(file.read(MAX_FILE_BYTES + 1), origin=name_or_path)


def parse(text: str | bytes, *, origin: str = "experiment") -> Experiment:
    """Read an experiment from TOML text (bytes: UTF-8). Raises ExperimentError, which begins with
    `origin`."""
    if len(text) > MAX_FILE_BYTES:
        raise ExperimentError(f"{origin}: longer than {MAX_FILE_BYTES} bytes: data goes to --data.source")
    try:
        return checked(msgspec.toml.decode(text))
    except RecursionError:
        raise ExperimentError(f"{origin}: nested too deeply: it has tables of fields") from None
    except ValueError as error:  # malformed TOML, not UTF-8, or an ExperimentError
        raise ExperimentError(f"{origin}: {one_line(error)}") from None


def revalidate(experiment: Experiment) -> Experiment:
    """Check an experiment that was built or edited in Python. Raises ExperimentError."""
    return checked(msgspec.to_builtins(experiment))


def checked(fields: Any) -> Experiment:
    """The experiment of these tables of fields. Raises ExperimentError, with the key and its value."""
    for section, table in fields.items():
        for key, value in table.items() if isinstance(table, dict) else ():
            if isinstance(value, float) and not math.isfinite(value):
                raise ExperimentError(f"{section}.{key} = {value} must be a finite number")
    try:
        return check(msgspec.convert(fields, Experiment))
    except msgspec.ValidationError as error:
        raise ExperimentError(one_line(error)) from None


def edited(experiment: Experiment, edits: Mapping[str, Mapping[str, object]]) -> Experiment:
    """The unchecked experiment with these values: `{"train": {"max_iters": 2}}`."""
    sections = {
        section: msgspec.structs.replace(getattr(experiment, section), **fields)
        for section, fields in edits.items()
    }
    return msgspec.structs.replace(experiment, **sections)


def differing_keys(found: Experiment, asked: Experiment) -> list[str]:
    """`model.n_layer = 2 instead of 4` for every field in which two experiments differ."""
    fields = [msgspec.to_builtins(experiment) for experiment in (found, asked)]
    pairs = [
        (f"{section}.{key}", value, fields[1][section][key])
        for section in fields[0]
        for key, value in fields[0][section].items()
    ]
    return [f"{key} = {value} instead of {other}" for key, value, other in pairs if value != other]


def to_toml(experiment: Experiment) -> str:
    """The experiment as TOML text with all fields."""
    return msgspec.toml.encode(experiment).decode()


def one_line(error: BaseException) -> str:
    """The message in one line, with msgspec's `$.model.n_layer` as `model.n_layer`."""
    return " ".join(str(error).split()).replace("`$.", "`").replace("- at `$`", "at the top level")
