"""The command line.

Exit codes: 0 success; 1 a comparison or an engine failed; 2 bad usage or a bad experiment; 3 this machine
lacks something; 4 the run was asked to end early, and saved its state; 130 Ctrl-C.
"""

import importlib.metadata
import os
import platform
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import msgspec
import tyro

from compare import parser
from compare.commands.collectives import Collectives
from compare.commands.convert import Convert
from compare.commands.diff import Diff
from compare.commands.doctor import Doctor
from compare.commands.lesson import ReadLesson
from compare.commands.list import List
from compare.commands.plan import Plan
from compare.commands.registry import STUDIES
from compare.commands.report import Report
from compare.commands.sample import Sample
from compare.execute.launch import EngineError, EnvironmentMissing
from compare.flags import ExperimentFlags, defaults_for
from compare.formats.nanogpt import DTYPE, is_config, read_config, translate_flags
from compare.run.study import Study
from compare.setup.presets import PRESETS
from compare.spec.experiment import ExperimentError, named_experiments
from compare.spec.names import did_you_mean
from compare.system.disk import no_room
from compare.system.tensors import RecordError
from compare.terminal import errors_console, printable

COMMANDS: dict[str, Any] = STUDIES | {
    "report": Report,
    "diff": Diff,
    "collectives": Collectives,
    "plan": Plan,
    "lesson": ReadLesson,
    "list": List,
    "doctor": Doctor,
    "convert": Convert,
    "sample": Sample,
}
HELP = "\n".join(
    [
        "usage: shardpair COMMAND [arguments]",
        "Sharded training in JAX and in PyTorch, side by side: proven equal, measured.",
        "",
        "Train and compare:",
        "  run          train one experiment with each engine, compare, write a report",
        "  resume       continue from checkpoints, on any engines and layout",
        "  sweep        layouts and settings, each compared with one device",
        "  report       show a finished run again, and rewrite its page",
        "  diff         compare two finished runs: numbers, settings, costs",
        "Prove:",
        "  check        every engine against one unsharded device, or nanoGPT",
        "  faults       plant each known mistake: each must fail at its rung",
        "Measure:",
        "  bench        which engine, layout or setting is faster, and how surely",
        "  profile      where the time of one step goes, device by device",
        "  ledger       bytes that each engine sends in a step, and the textbook's",
        "  memory       bytes at the peak of a step, by class, engine and layout",
        "  collectives  collectives by size: gloo or NCCL, torch-manual's code, and XLA",
        "Choose a layout:",
        "  plan         layouts that are legal and fit, with memory and bytes sent",
        "Read:",
        "  lesson       one strategy in every engine, side by side, on a page",
        "  list         names of experiments, presets, faults, engines, lessons",
        "  doctor       installed packages, and devices",
        "Use a trained model:",
        "  convert      convert a checkpoint: nanoGPT, Hugging Face, orbax",
        "  sample       draw text from a checkpoint",
        "Begin with      shardpair run                  (a minute; results in runs/)",
        "Then            shardpair COMMAND --help       (every flag, with examples)",
        "Most commands   --dry_run: print the plan; --json: for programs; also --version",
    ]
)
"""The text of `shardpair --help`."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code. tyro raises SystemExit for --help."""
    arguments = sys.argv[1:] if arguments is None else arguments
    os.environ.pop("MPLBACKEND", None)  # set by notebooks; no backend is needed
    try:
        try:
            return _dispatch(arguments)
        finally:
            if sys.stdout:  # None if the caller has closed it
                sys.stdout.flush()
    except (ExperimentError, RecordError) as error:
        code, message = 2, str(error)
    except EnvironmentMissing as error:
        code, message = 3, str(error)
    except EngineError as error:
        code, message = error.exit_code, str(error)  # its log was printed when it failed
    except KeyboardInterrupt as interrupt:
        code, message = 130, str(interrupt) or "interrupted; every process was ended"
    except BrokenPipeError:
        errors_console().on_broken_pipe()  # exits with 1
    except OSError as error:
        code = 2 if isinstance(error, FileNotFoundError | PermissionError) else 1
        message = no_room(error) or str(error)
    errors_console().print(f"shardpair: error: {printable(message)}", style="red")
    return code


def _dispatch(arguments: list[str]) -> int:
    match arguments:
        case ["--version", *_]:
            python = platform.python_version()
            print(f"shardpair {importlib.metadata.version('shardpair')} (python {python})")
            return 0
        case ["--help" | "-h", *_]:
            print(HELP)
            return 0
        case [word, *_] if word.startswith("--tyro-"):  # completion for a shell, over all commands
            tyro.extras.subcommand_cli_from_dict(COMMANDS, args=arguments, prog="shardpair")
    return parse(arguments)()


def parse(arguments: list[str]) -> Any:
    """A command with its arguments.

    Raises:
        ExperimentError: no such command, experiment or flag, or the experiment is not the first argument.
        SystemExit: with code 0, after --help.
    """
    if not arguments:
        raise ExperimentError("give a command, such as shardpair run; see shardpair --help")
    if (first := arguments[0]) not in COMMANDS:
        if first in named_experiments() or Path(first).suffix in (".toml", ".py"):
            raise ExperimentError(f"{first} is an experiment: shardpair run {first}")
        if first in PRESETS:
            raise ExperimentError(f"{first} is a preset: shardpair run --preset {first}")
        hint = did_you_mean(first, COMMANDS) or "; see shardpair --help"
        raise ExperimentError(f"{first}: no such command{hint}")
    word, *line = arguments
    command = COMMANDS[word]
    if not issubclass(command, ExperimentFlags):
        return parser.parse(COMMANDS, word, line)
    name = line[0] if line and not line[0].startswith("-") else command.default
    ignored = list[str]()
    if is_config(name):
        flags, ignored = translate_flags(name, line[1:])
        line = [name, *flags]
    found = parser.parse(COMMANDS, word, line, default=defaults_for(command, name))
    if (other := found.experiment) != name:
        if other not in named_experiments() and Path(other).suffix not in (".toml", ".py"):
            raise ExperimentError(f"unexpected argument {other}: see shardpair {word} --help")
        line = [other, *(argument for argument in line if argument != other)]
        raise ExperimentError(f"{other}: give the experiment first: {shlex.join(['shardpair', word, *line])}")
    found = msgspec.structs.replace(found, given=flags_in(line), line=shlex.join(["shardpair", word, *line]))
    for flag in {"continue", "results"} & found.given:
        if line[0] == name:
            raise ExperimentError(f"--{flag} reads the experiment of the folder: leave out {name}")
    if is_config(name):
        _check_config(found, ignored)
    return found


def _check_config(command: ExperimentFlags, ignored: list[str]) -> None:
    """Print what nanoGPT's config file and flags set without effect.

    Raises ExperimentError: the file needs initial weights, and no flag gives them.
    """
    config = read_config(Path(command.experiment))
    has_weights = not isinstance(command, Study) or command.init_from or command.source or command.continue_
    if config.init_from and not has_weights:
        raise ExperimentError(
            f"{command.experiment}: init_from = {config.init_from}: give weights with --init_from, or a "
            f"checkpoint with --resume"
        )
    for note in dict.fromkeys([*config.notes, *ignored]):
        if note != DTYPE or "precision.dtype" not in command.given:
            errors_console().print(f"{printable(command.experiment)}: {printable(note)}", style="yellow")


def flags_in(line: list[str]) -> frozenset[str]:
    """Fields that a command line sets, such as `rounds` and `layout.reshard_after_forward`."""
    names = (word.partition("=")[0][2:].replace("-", "_") for word in line if word.startswith("--"))
    return frozenset(re.sub(r"(^|\.)no_", r"\1", name) for name in names)
