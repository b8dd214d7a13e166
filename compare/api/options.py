"""Options of the Python API: values of Python as flags, and errors that name options."""

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np

from compare.commands.registry import STUDIES
from compare.run.study import Study
from compare.spec.experiment import Experiment, ExperimentError, revalidate, values_allowed
from compare.spec.names import did_you_mean

NOT_OPTIONS = {"experiment", "continue_", "dry_run", "json", "given", "line", "chip", "results"}
"""Fields that options cannot set: other functions do, or the command line alone."""
FLAG = re.compile(r"`[^`]*`|--(no_)?([a-z][\w.]*)")
"""A command in backquotes, or a flag."""


def study_of(name: str, experiment: Experiment | str | Path, options: Mapping[str, Any]) -> Study:
    """The study with these options. Raises ExperimentError."""
    if name not in STUDIES:
        names = did_you_mean(name, STUDIES) or f" (there are {', '.join(STUDIES)})"
        raise ExperimentError(f"{name}: no such study{names}")
    command = STUDIES[name]
    if isinstance(experiment, Experiment):
        title, default = "notebook", revalidate(experiment)
    else:
        title = str(experiment)
        default = command.default_experiment(title)
    allowed = set(command.__struct_fields__) - set(Experiment.__struct_fields__) - NOT_OPTIONS
    for option in options:
        if option not in allowed:
            names = did_you_mean(option, allowed) or f" (there are {', '.join(sorted(allowed))})"
            raise ExperimentError(f"{option}: no such option{names}")
    own = {"experiment": title, "given": list(options)}
    try:
        fields = {**msgspec.to_builtins(default), **plain(options), **own}
        return msgspec.convert(fields, command, dec_hook=lambda of, value: of(value))
    except msgspec.ValidationError as error:
        raise ExperimentError(_explained(error, command, options)) from None


def _explained(error: msgspec.ValidationError, command: type, options: Mapping[str, Any]) -> str:
    """msgspec's error as `devices = "two": give a whole number`."""
    place = re.search(r"`\$\.(\w+)(\[)?", str(error))
    assert place
    of = get_type_hints(command)[place[1]]
    if Path in get_args(of):
        return f"{place[1]} = {shown(options[place[1]])}: give a path"
    allowed = values_allowed(error, get_args(of)[0] if place[2] else of)
    return f"{place[1]} = {shown(options[place[1]])}: give {allowed}"


def plain(value: Any) -> Any:
    """The value with NumPy's numbers and arrays as Python's, and paths as text."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return str(value) if isinstance(value, PurePath) else value


def shown(value: object) -> str:
    """A value in an error, in one line."""
    return f'"{value}"' if isinstance(value, str) else " ".join(repr(value).split())


@contextmanager
def flags_as_options() -> Generator[None]:
    """Name options instead of flags in the error of a request: devices, not --devices."""
    try:
        yield
    except ExperimentError as error:
        words = FLAG.sub(
            lambda found: f"{found[2]}{'=False' * bool(found[1])}" if found[2] else found[0], str(error)
        )
        raise type(error)(words) from None
