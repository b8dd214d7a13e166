"""Experiments in TOML: one table per section (`compare.spec.sections`). Unknown keys are errors."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import structs

from compare.spec.checks import ExperimentError, check
from compare.spec.names import did_you_mean
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


SAME_NUMBERS = "model.attention"
"""The field of a model that changes no number."""


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
        names = f" (named: {', '.join(known)})" if wrong else ""
        raise ExperimentError(f"{name_or_path}{wrong}{did_you_mean(name_or_path, known) or names}")
    with path.open("rb") as file:
        return parse(file.read(MAX_FILE_BYTES + 1), origin=name_or_path)


def parse(text: str | bytes, *, origin: str = "experiment") -> Experiment:
    """Read an experiment from TOML text (bytes: UTF-8, perhaps with a byte-order mark).

    Raises ExperimentError, which begins with `origin`.
    """
    if len(text) > MAX_FILE_BYTES:
        raise ExperimentError(f"{origin}: longer than {MAX_FILE_BYTES} bytes: data goes to --data.source")
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
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
        raise ExperimentError(_explained(error, fields)) from None


def _explained(error: msgspec.ValidationError, fields: Mapping[str, Any]) -> str:
    """msgspec's error as `layout.chunks = 0: give 1 or more`, or a missing field with the nearest name."""
    place = re.search(r"`\$\.?([\w.]*)`$", str(error))
    path = place[1].split(".") if place and place[1] else []
    of, value = Experiment, fields
    for name in path:
        of, value = next(field.type for field in structs.fields(of) if field.name == name), value[name]
    if unknown := re.search(r"unknown field `(.*?)`", str(error)):
        key, known = unknown[1], of.__struct_fields__
        if not path and not isinstance(value[key], dict):
            flag = f"--{key} {value[key]}" if isinstance(value[key], str | int) else f"--{key}"
            return f"{key}: a file has only sections, such as [model]; give flags on the command line: {flag}"
        what = "field" if path else "section"
        names = did_you_mean(key, known) or f" (there are {', '.join(known)})"
        return f"{'.'.join([*path, key])}: no such {what}{names}"
    shown = f'"{value}"' if isinstance(value, str) else value
    return f"{'.'.join(path)} = {shown}: give {values_allowed(error, of)}"


BOUNDS = {">=": "{} or more", "<=": "{} or less", ">": "more than {}", "<": "less than {}"}
KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "object": "a section",
    "array": "a list",
}


def values_allowed(error: msgspec.ValidationError, of: Any) -> str:
    """Words for the values that a type allows, after an error of msgspec: `1 or more`, `adamw or sgd`."""
    if get_origin(of) is Literal:
        *others, last = filter(None, map(str, get_args(of)))
        return f"{', '.join(others)} or {last}" if others else last
    if bound := re.search(r"^Expected `\w+` ([<>]=?) (\S+)", str(error)):
        return BOUNDS[bound[1]].format(bound[2])
    return KINDS[str(error).split("`")[1].split()[0]]


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
