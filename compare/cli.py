"""The command line: which command, which defaults, which exit code.

Exit codes: 0 all is well; 1 the comparison failed or an engine did; 2 bad usage or a bad experiment;
3 this machine lacks something; 130 Ctrl-C.
"""

import errno
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Annotated, Any, Union

import msgspec
import tyro

from compare.commands.arguments import Spec, defaults_for
from compare.commands.bench import Bench
from compare.commands.buckets import Buckets
from compare.commands.check import Check
from compare.commands.collectives import Collectives
from compare.commands.convert import Convert
from compare.commands.doctor import Doctor
from compare.commands.faults import Faults
from compare.commands.given import flags_given
from compare.commands.golden import Golden
from compare.commands.ledger import Ledgers
from compare.commands.lesson import ReadLesson
from compare.commands.list import List
from compare.commands.matrix import Matrix
from compare.commands.mirror import Mirror
from compare.commands.profile import Profile
from compare.commands.report import Report
from compare.commands.resume import Resume
from compare.commands.run import Run
from compare.commands.sample import Sample
from compare.commands.schedule import Draw
from compare.commands.sweep import Sweep
from compare.contract.engines.registry import OBJECTIONS
from compare.contract.experiment import ExperimentError, load, named_experiments
from compare.contract.tensors import RecordError
from compare.execute.launch import EngineError, EnvironmentMissing
from compare.execute.paths import is_utf8
from compare.studies.golden import EXPERIMENT as GOLDEN
from compare.studies.nanogpt_config import notes_on
from compare.terminal import standard_output
from compare.terminal.console import errors_console, printable

COMMANDS: dict[str, type] = {
    "run": Run,
    "resume": Resume,
    "check": Check,
    "faults": Faults,
    "matrix": Matrix,
    "golden": Golden,
    "sweep": Sweep,
    "bench": Bench,
    "profile": Profile,
    "ledger": Ledgers,
    "list": List,
    "report": Report,
    "doctor": Doctor,
    "schedule": Draw,
    "lesson": ReadLesson,
    "mirror": Mirror,
    "collectives": Collectives,
    "convert": Convert,
    "sample": Sample,
    "buckets": Buckets,
}
DEFAULT_EXPERIMENT = {
    "run": "demo",
    "resume": "",
    "check": "check",
    "bench": "demo",
    "profile": "demo",
    "faults": "check",
    "matrix": "check",
    "ledger": "check",
    "buckets": "demo",
    "sweep": "demo",
}
FIXED_EXPERIMENT = {"golden": GOLDEN}
_ABOUT_A_NAME = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
_ABOUT_A_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS)

DESCRIPTION = """Sharded training in JAX and in PyTorch, side by side: proven equal, measured, explained.

Begin with `shardpair run` (a minute), then `shardpair run --help` for everything you can override.
`shardpair list` names what there is; `shardpair --version` says what this is."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    errors = errors_console()

    def say(error: object) -> None:
        errors.print(f"shardpair: error: {printable(str(error))}", style="red")

    for objection in OBJECTIONS:
        errors.print(f"shardpair: {printable(objection)}", style="yellow")
    try:
        _require_utf8(arguments)
        if arguments[:1] == ["--version"]:
            print(version_line())
            return 0
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
        errors.print(f"shardpair: {interrupt or 'interrupted; every process was ended'}", style="red")
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
            raise ExperimentError(f"{argument} is not UTF-8: rename the file or folder")


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
        for note in notes_on(name):
            errors_console().print(f"{printable(name)}: {printable(note)}", style="yellow")
    default = command.default_experiment(name) if isinstance(command, Spec) else load(name)
    return command(default)


def parse(arguments: list[str]) -> tuple[Any, str]:
    """A command with its arguments, and the experiment that they override; nothing is started.

    Raises:
        ExperimentError: no such experiment, or one that is not given first.
        SystemExit: an unknown command or flag, or --help.
    """
    name = _experiment_name(arguments)
    names = {word: FIXED_EXPERIMENT.get(word, DEFAULT_EXPERIMENT.get(word, "demo")) for word in COMMANDS}
    names |= {arguments[0]: name} if arguments[:1] and arguments[0] in COMMANDS else {}
    commands: Any = Union[tuple(_subcommand(word, names[word]) for word in COMMANDS)]  # noqa: UP007
    command = tyro.cli(
        commands, args=arguments, prog="shardpair", description=DESCRIPTION, use_underscores=True
    )
    if isinstance(command, Spec):
        if command.experiment != name:
            raise ExperimentError(_misplaced(arguments[0], command.experiment))
        command = msgspec.structs.replace(command, given=_flags_given(arguments, name))
    return command, name


def _flags_given(arguments: list[str], name: str) -> frozenset[str]:
    """The flags of an accepted command line, read again by its command alone."""
    word, *line = arguments
    command: Any = COMMANDS[word]
    default = defaults_for(command, name)
    return flags_given(
        lambda default: tyro.cli(type(default), args=line, default=default, use_underscores=True), default
    )


def _subcommand(word: str, name: str) -> object:
    """One command for tyro, its arguments filled from the experiment `name` where it takes one."""
    command: Any = COMMANDS[word]
    if issubclass(command, Spec):
        return Annotated[command, tyro.conf.subcommand(word, default=defaults_for(command, name))]
    return Annotated[command, tyro.conf.subcommand(word)]


def _misplaced(command: str, word: str) -> str:
    """Advice about a word that is not behind a flag, nor first."""
    if word in named_experiments() or Path(word).suffix in (".toml", ".py"):
        return f"give the experiment first: shardpair {command} {word} ..."
    return f"{word}: no flag takes this (a switch is --model.bias or --model.no_bias, without a value)"


def _experiment_name(arguments: list[str]) -> str:
    """The experiment that gives the defaults: known before the other arguments can be read."""
    command, following = (arguments[0], arguments[1:2]) if arguments else ("", [])
    if command in FIXED_EXPERIMENT:
        return FIXED_EXPERIMENT[command]
    if command in DEFAULT_EXPERIMENT and following and not following[0].startswith("-"):
        return following[0]
    return DEFAULT_EXPERIMENT.get(command, "demo")
