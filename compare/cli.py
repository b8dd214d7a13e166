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
from compare.formats.nanogpt import DTYPE, is_config, read_config, translated_flags
from compare.run.study import Study
from compare.spec.experiment import ExperimentError
from compare.system.tensors import RecordError
from compare.terminal import errors_console, printable

OTHERS: dict[str, dict[str, tuple[Any, str]]] = {
    "Train and compare": {
        "report": (Report, "show a finished run again, and rewrite its page"),
        "diff": (Diff, "compare two finished runs: numbers, settings, costs"),
    },
    "Prove": {},
    "Measure": {
        "collectives": (Collectives, "collectives by size: gloo or NCCL, torch-manual's way, and XLA"),
    },
    "Choose a layout": {
        "plan": (Plan, "layouts that are legal and fit, with memory and bytes sent"),
    },
    "Read": {
        "lesson": (ReadLesson, "one strategy in every engine, side by side, on a page"),
        "list": (List, "names of experiments, presets, faults, engines, lessons"),
        "doctor": (Doctor, "installed packages, and devices"),
    },
    "Use a trained model": {
        "convert": (Convert, "convert a checkpoint: nanoGPT, Hugging Face, orbax"),
        "sample": (Sample, "draw text from a checkpoint"),
    },
}
"""Commands that are not studies, by group of `shardpair --help`. Studies declare their group."""
COMMANDS = STUDIES | {word: command for group in OTHERS.values() for word, (command, _) in group.items()}
HEAD = """usage: shardpair COMMAND [arguments]
Sharded training in JAX and in PyTorch, side by side: proven equal, measured."""
TAIL = """Begin with      shardpair run                  (a minute; results in runs/)
Then            shardpair COMMAND --help       (every flag, with examples)
Most commands   --dry_run: print the plan; --json: for programs; also --version"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code. tyro raises SystemExit for --help and malformed flags."""
    arguments = sys.argv[1:] if arguments is None else arguments
    os.environ.pop("MPLBACKEND", None)  # set by notebooks; no backend is needed
    try:
        try:
            return _dispatch(arguments)
        finally:
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
        code, message = 2 if isinstance(error, FileNotFoundError | PermissionError) else 1, str(error)
    errors_console().print(f"shardpair: error: {printable(message)}", style="red")
    return code


def _dispatch(arguments: list[str]) -> int:
    match arguments:
        case ["--version", *_]:
            python = platform.python_version()
            print(f"shardpair {importlib.metadata.version('shardpair')} (python {python})")
            return 0
        case ["--help" | "-h", *_]:
            print(overview())
            return 0
        case [word, *_] if word.startswith("--tyro-"):  # completion for a shell, over all commands
            tyro.extras.subcommand_cli_from_dict(COMMANDS, args=arguments, prog="shardpair")
    command_type: Any = COMMANDS.get(arguments[0], object) if arguments else object
    config, notes = None, list[str]()
    if len(arguments) > 1 and issubclass(command_type, ExperimentFlags) and is_config(arguments[1]):
        config = read_config(Path(arguments[1]))
        flags, notes = translated_flags(arguments[1], arguments[2:])
        arguments = [*arguments[:2], *flags]
    command = parse(arguments)
    if config:
        has_weights = not isinstance(command, Study) or command.init_from or command.source
        if config.init_from and not (has_weights or command.continue_):
            raise ExperimentError(
                f"{arguments[1]}: init_from = {config.init_from}: give weights with --init_from, or a "
                f"checkpoint with --resume"
            )
        for note in dict.fromkeys([*config.notes, *notes]):
            if note != DTYPE or "precision.dtype" not in command.given:
                errors_console().print(f"{printable(arguments[1])}: {printable(note)}", style="yellow")
    return command()


def parse(arguments: list[str]) -> Any:
    """A command with its arguments.

    Raises:
        ExperimentError: no such command or experiment, or the experiment is not the first argument.
        SystemExit: code 0 after --help; 2 after tyro printed an error of a flag.
    """
    if not arguments or arguments[0] not in COMMANDS:
        wrong = f"{arguments[0]}: no such command" if arguments else "give a command, such as shardpair run"
        raise ExperimentError(f"{wrong}; see shardpair --help")
    word, *line = arguments
    command, prog = COMMANDS[word], f"shardpair {word}"
    if not issubclass(command, ExperimentFlags):
        return tyro.cli(command, args=line, prog=prog, use_underscores=True)
    name = line[0] if line and not line[0].startswith("-") else command.default
    found = tyro.cli(command, args=line, prog=prog, use_underscores=True, default=defaults_for(command, name))
    if found.experiment != name:
        raise ExperimentError(
            f"unexpected argument {found.experiment}: the experiment must come first, and switches take no "
            f"value: see shardpair {word} --help"
        )
    return msgspec.structs.replace(found, given=flags_in(line), line=shlex.join(["shardpair", *arguments]))


def flags_in(line: list[str]) -> frozenset[str]:
    """Fields that a command line sets, such as `rounds` and `layout.reshard_after_forward`."""
    names = (word.partition("=")[0][2:].replace("-", "_") for word in line if word.startswith("--"))
    return frozenset(re.sub(r"(^|\.)no_", r"\1", name) for name in names)


def overview() -> str:
    """The text of `shardpair --help`: every command, by group."""
    lines = [HEAD, ""]
    for group, others in OTHERS.items():
        studies = {word: study.brief for word, study in STUDIES.items() if study.group == group}
        briefs = studies | {word: brief for word, (_, brief) in others.items()}
        lines += [f"{group}:", *(f"  {word:<12} {brief}" for word, brief in briefs.items())]
    return "\n".join([*lines, TAIL])
