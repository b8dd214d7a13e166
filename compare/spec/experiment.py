"""One experiment: reading it, and refusing what cannot work before any process starts.

The file format is TOML, one table per section (`compare.spec.sections`). Reading is strict: an unknown
key or a wrong type is an error that names the key.
"""

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
"""Read from here, beside what stands below."""

MAX_CPU_DEVICES = 64  # virtual devices share the cores; past this a run only measures the scheduler
MAX_FILE_BYTES = 16_384  # Python's TOML reader takes minutes for 100 kB of dots


def named_experiments() -> dict[str, Path]:
    """The experiments that ship with the package, by name."""
    folder = Path(__file__).parent.parent / "experiments"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load(name_or_path: str) -> Experiment:
    """Read an experiment: the name of one that ships with the package, or a TOML file.

    Raises ExperimentError: no such name or file, or no experiment in it.
    """
    return parse(_read(name_or_path), origin=name_or_path)


def layout_fields(name_or_path: str) -> frozenset[str]:
    """The fields of the layout that an experiment's file gives, whatever their values. Raises as `load`."""
    load(name_or_path)  # says what is wrong with a file that is none
    return frozenset(tables_in(_read(name_or_path), origin=name_or_path).get("layout", {}))


def _read(name_or_path: str) -> bytes:
    """An experiment's file, as far as one may go. Raises ExperimentError if there is none."""
    known = named_experiments()
    path = known.get(name_or_path, Path(name_or_path))
    if wrong := why_not_readable(path):
        wrong = ": no such file or named experiment" if wrong == "does not exist" else f" {wrong}"
        raise ExperimentError(f"{name_or_path}{wrong} (named: {', '.join(known)})")
    return beginning(path)


def beginning(path: Path) -> bytes:
    """A file, as far as `tables_in` reads it."""
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES + 1)


def tables_in(text: str | bytes, *, origin: str) -> dict[str, Any]:
    """The fields of TOML text (bytes: UTF-8). Raises ExperimentError, whose message begins with `origin`."""
    if len(text) > MAX_FILE_BYTES:
        raise ExperimentError(f"{origin}: longer than {MAX_FILE_BYTES} bytes: data goes to --data.source")
    try:
        return msgspec.toml.decode(text)
    except (msgspec.DecodeError, ValueError) as error:  # ValueError: not UTF-8, a number of 5000 digits
        raise ExperimentError(f"{origin}: {one_line(error)}") from None
    except RecursionError:
        raise ExperimentError(f"{origin}: nested too deeply: it has tables of fields") from None


def parse(text: str | bytes, *, origin: str = "experiment") -> Experiment:
    """Read an experiment from TOML text. Raises ExperimentError, whose message begins with `origin`."""
    fields = tables_in(text, origin=origin)
    try:
        return checked(fields)
    except ExperimentError as error:
        raise ExperimentError(f"{origin}: {error}") from None


def revalidate(experiment: Experiment) -> Experiment:
    """Apply the bounds on types again and `check`: for a spec that was built or edited in Python."""
    return checked(msgspec.to_builtins(experiment))


def checked(fields: Any) -> Experiment:
    """An experiment from its tables of fields. Raises ExperimentError, which names the key and its value."""
    for section, table in fields.items():
        for key, value in table.items() if isinstance(table, dict) else ():
            if isinstance(value, float) and not math.isfinite(value):
                raise ExperimentError(f"{section}.{key} = {value} must be a finite number")
    try:
        return check(msgspec.convert(fields, Experiment))
    except msgspec.ValidationError as error:
        raise ExperimentError(one_line(error)) from None


def edited(experiment: Experiment, edits: Mapping[str, Mapping[str, object]]) -> Experiment:
    """The experiment with other values in some fields, unchecked: `{"train": {"max_iters": 2}}`."""
    sections = {
        section: msgspec.structs.replace(getattr(experiment, section), **fields)
        for section, fields in edits.items()
    }
    return msgspec.structs.replace(experiment, **sections)


def to_toml(experiment: Experiment) -> str:
    """The resolved spec as TOML text, every field spelled out."""
    return msgspec.toml.encode(experiment).decode()


def one_line(error: BaseException) -> str:
    """msgspec's message with its `$.model.n_layer` path as we write keys: `model.n_layer`."""
    return " ".join(str(error).split()).replace("`$.", "`").replace("- at `$`", "at the top level")
