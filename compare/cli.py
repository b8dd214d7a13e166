"""The command line: which command, which defaults, which exit code.

Exit codes: 0 all is well; 1 the comparison failed or an engine did; 2 bad usage or a bad experiment;
3 this machine lacks something; 4 it was asked to end early, and saved its state; 130 Ctrl-C.
"""

import errno
import functools
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Annotated, Any, Union

import msgspec
import tyro

from compare.commands.command_line import read_line, suggestion
from compare.commands.convert import Convert
from compare.commands.diff import Diff
from compare.commands.doctor import Doctor
from compare.commands.given import flags_given
from compare.commands.lesson import ReadLesson
from compare.commands.list import List
from compare.commands.overview import overview
from compare.commands.report import Report
from compare.commands.runs import Runs
from compare.commands.sample import Sample
from compare.execute.launch import EngineError, EnvironmentMissing
from compare.execute.paths import is_utf8
from compare.flags.arguments import FixedExperiment, Spec, defaults_for
from compare.host.tensors import RecordError
from compare.spec.experiment import ExperimentError, load, named_experiments, shortened
from compare.studies.nanogpt_config import begins_with, notes_on
from compare.studies.registry import STUDIES
from compare.terminal import standard_output
from compare.terminal.console import errors_console, printable

COMMANDS: dict[str, type] = {
    **STUDIES,
    "list": List,
    "runs": Runs,
    "report": Report,
    "diff": Diff,
    "doctor": Doctor,
    "lesson": ReadLesson,
    "convert": Convert,
    "sample": Sample,
}
DEFAULT_EXPERIMENT = {
    **{word: study.default for word, study in STUDIES.items()},
}
FIXED_EXPERIMENT = {
    word: study.default for word, study in STUDIES.items() if issubclass(study, FixedExperiment)
}
_ABOUT_A_NAME = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
_ABOUT_A_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    os.environ.pop("MPLBACKEND", None)  # a kernel's, which matplotlib may not find here; a Figure needs none
    errors = errors_console()

    def say(error: object) -> None:
        errors.print(f"shardpair: error: {printable(str(error))}", style="red")

    try:
        _require_utf8(arguments)
        if arguments[:1] == ["--version"]:
            print(version_line())
            return 0
        if arguments[:1] in (["--help"], ["-h"]):
            print(overview())
            return 0
        if arguments[:1] and arguments[0].startswith("--tyro-"):
            _print_completion(arguments)
        return _dispatch(arguments)
    except (ExperimentError, RecordError) as error:
        say(error)
        return 2
    except EnvironmentMissing as error:
        say(error)
        return 3
    except EngineError as error:
        say(error)  # its log was shown when it failed
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        errors.print(f"shardpair: {str(interrupt) or 'interrupted; every process was ended'}", style="red")
        return 130
    except BrokenPipeError:  # `shardpair ... | head`: the reader has left, and nothing went wrong
        standard_output.discard()
        return 0
    except OSError as error:
        say(_described(error))
        return 2 if isinstance(error, _ABOUT_A_NAME) or error.errno in _ABOUT_A_PATH else 1
    except MemoryError:
        say("out of memory: make the model or the batch smaller")
        return 1


def version_line() -> str:
    """This package's version, and those of Python and the frameworks beside it, without importing these."""
    found = {"shardpair": _version_of("shardpair"), "python": platform.python_version()}
    found |= {package: _version_of(package) for package in ("jax", "torch", "numpy")}
    ours, *others = (f"{package} {version}" for package, version in found.items())
    return f"{ours} ({', '.join(others)})"


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _require_utf8(arguments: list[str]) -> None:
    """Records are JSON, and their names UTF-8: other bytes could be read, but not written down."""
    for argument in arguments:
        if not is_utf8(argument):
            raise ExperimentError(f"{argument} is not UTF-8: write it so, or rename the file or folder")


def _described(error: OSError) -> str:
    """An error of reading or writing, in words: the file, and why."""
    if error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    if isinstance(error, FileNotFoundError):  # only os.getcwd names no file
        return "the current folder does not exist any more: go to another"
    return f"{error.strerror or error}"


def _dispatch(arguments: list[str]) -> int:
    if arguments[:2] == ["bench", "collectives"]:  # a benchmark, but not of an experiment
        arguments = arguments[1:]
    command, name = parse(arguments)
    if isinstance(command, Spec):
        if (begin := begins_with(name)) and not (command.init_from or command.source or command.continue_):
            raise ExperimentError(
                f"{name}: init_from = {begin}: give weights with --init_from, or a checkpoint with --resume"
            )
        for note in notes_on(name):
            errors_console().print(f"{printable(name)}: {printable(note)}", style="yellow")
    default = command.default_experiment(name) if isinstance(command, Spec) else load(name)
    return command(default)


def parse(arguments: list[str]) -> tuple[Any, str]:
    """A command with its arguments, and the experiment that they override; nothing is started.

    Raises:
        ExperimentError: no such command, flag or experiment, or one that is not given first.
        SystemExit: --help was asked for, and printed.
    """
    if not arguments:
        raise ExperimentError("give a command, such as shardpair run; see shardpair --help")
    word, *line = arguments
    if word not in COMMANDS:
        like = suggestion(word, COMMANDS)
        raise ExperimentError(f"{shortened(word)}: no such command{like}; see shardpair --help")
    command: Any = COMMANDS[word]
    prog = f"shardpair {word}"
    if not issubclass(command, Spec):
        return read_line(command, line, prog=prog, default=None), "demo"
    name = _experiment_name(arguments)
    default = defaults_for(command, name)
    read = functools.partial(read_line, command, line, prog=prog)
    found = read(default=default)
    if found.experiment != name:
        raise ExperimentError(_misplaced(word, found.experiment))
    given = flags_given(found, default, lambda other: read(default=other))
    return msgspec.structs.replace(found, given=given), name


def _subcommand(word: str) -> object:
    command: Any = COMMANDS[word]
    return Annotated[command, tyro.conf.subcommand(word)]


def _print_completion(arguments: list[str]) -> None:
    """tyro's completion for a shell, over all commands."""
    commands: Any = Union[tuple(map(_subcommand, COMMANDS))]  # noqa: UP007
    tyro.cli(commands, args=arguments, prog="shardpair", use_underscores=True)


def _misplaced(command: str, word: str) -> str:
    """Advice about a word that is not behind a flag, nor first."""
    if word in named_experiments() or Path(word).suffix in (".toml", ".py"):
        return f"give the experiment first: shardpair {command} {word} ..."
    return (
        f"{shortened(word)}: no flag takes this (a switch is --model.bias or --model.no_bias, without a "
        f"value); see shardpair {command} --help"
    )


def _experiment_name(arguments: list[str]) -> str:
    """The experiment that gives the defaults: known before the other arguments can be read."""
    command, following = (arguments[0], arguments[1:2]) if arguments else ("", [])
    if command in FIXED_EXPERIMENT:
        return FIXED_EXPERIMENT[command]
    if command in DEFAULT_EXPERIMENT and following and not following[0].startswith("-"):
        return following[0]
    return DEFAULT_EXPERIMENT.get(command, "demo")
