"""The command line: which command, which defaults, which exit code.

Exit codes: 0 all is well; 1 the comparison failed or an engine did; 2 bad usage or a bad experiment;
3 this machine lacks something; 4 it was asked to end early, and says what is saved; 130 Ctrl-C.
"""

import importlib.metadata
import os
import platform
import re
import shlex
import sys
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
from compare.formats.nanogpt_config import begins_with, in_our_words, is_config, notes_on
from compare.run.study import Study
from compare.spec.experiment import ExperimentError
from compare.system.tensors import RecordError
from compare.terminal import errors_console, printable

OTHERS: dict[str, dict[str, tuple[Any, str]]] = {
    "Train and compare": {
        "report": (Report, "show a finished run again, and write its page anew"),
        "diff": (Diff, "two finished runs of any settings: numbers, settings, costs"),
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
        "doctor": (Doctor, "what is installed, and which devices there are"),
    },
    "Use a trained model": {
        "convert": (Convert, "a training's state into another format: nanoGPT, Hugging Face"),
        "sample": (Sample, "draw text from a checkpoint"),
    },
}
"""Commands that are no studies, in groups: a study says itself where it belongs."""
COMMANDS = STUDIES | {word: command for group in OTHERS.values() for word, (command, _) in group.items()}
HEAD = """usage: shardpair COMMAND [arguments]
Sharded training in JAX and in PyTorch, side by side: proven equal, measured."""
TAIL = """Begin with      shardpair run                  (a minute; results in runs/)
More of one     shardpair COMMAND --help       (every flag, with examples)
Of most         --dry_run: what would run; --json: for machines; also --version"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code; SystemExit after --help or a malformed flag is tyro's."""
    arguments = sys.argv[1:] if arguments is None else arguments
    os.environ.pop("MPLBACKEND", None)  # a kernel's, which matplotlib may not find here; a Figure needs none
    try:
        try:
            return _dispatch(arguments)
        finally:
            sys.stdout.flush()
    except (ExperimentError, RecordError) as error:
        code, said = 2, str(error)
    except EnvironmentMissing as error:
        code, said = 3, str(error)
    except EngineError as error:
        code, said = error.exit_code, str(error)  # its log was shown when it failed
    except KeyboardInterrupt as interrupt:
        code, said = 130, str(interrupt) or "interrupted; every process was ended"
    except BrokenPipeError:
        errors_console().on_broken_pipe()  # exits with 1, silent as rich is where it prints itself
    except OSError as error:
        code, said = 2 if isinstance(error, FileNotFoundError | PermissionError) else 1, str(error)
    errors_console().print(f"shardpair: error: {printable(said)}", style="red")
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
    notes = list[str]()
    takes_experiment = arguments and issubclass(COMMANDS.get(arguments[0], object), ExperimentFlags)
    if takes_experiment and len(arguments) > 1 and is_config(arguments[1]):
        flags, notes = in_our_words(arguments[1], arguments[2:])
        arguments = [*arguments[:2], *flags]
    command, name = parse(arguments)
    if not isinstance(command, ExperimentFlags):
        return command()
    has_weights = not isinstance(command, Study) or command.init_from or command.source or command.continue_
    if (begin := begins_with(name)) and not has_weights:
        raise ExperimentError(
            f"{name}: init_from = {begin}: give weights with --init_from, or a checkpoint with --resume"
        )
    for note in dict.fromkeys([*notes_on(name, command.given), *notes]):
        errors_console().print(f"{printable(name)}: {printable(note)}", style="yellow")
    return command()


def parse(arguments: list[str]) -> tuple[Any, str]:
    """A command with its arguments, and the experiment that they override; nothing is started.

    Raises:
        ExperimentError: no such command or experiment, or one that is not given first.
        SystemExit: code 0 after --help; 2 after tyro said what is wrong with a flag.
    """
    if not arguments or arguments[0] not in COMMANDS:
        said = f"{arguments[0]}: no such command" if arguments else "give a command, such as shardpair run"
        raise ExperimentError(f"{said}; see shardpair --help")
    word, *line = arguments
    command, prog = COMMANDS[word], f"shardpair {word}"
    if not issubclass(command, ExperimentFlags):
        return tyro.cli(command, args=line, prog=prog, use_underscores=True), "demo"
    is_named = line and not line[0].startswith("-")
    name = line[0] if is_named else command.default
    default = defaults_for(command, name)
    found = tyro.cli(command, args=line, prog=prog, use_underscores=True, default=default)
    if found.experiment != name:
        raise ExperimentError(
            f"unexpected argument {found.experiment}: the experiment must come first, and switches take no "
            f"value: see shardpair {word} --help"
        )
    line_of = shlex.join(["shardpair", *arguments])
    return msgspec.structs.replace(found, given=flags_in(line), line=line_of), name


def flags_in(line: list[str]) -> frozenset[str]:
    """Fields that a command line gives, such as `rounds` and `layout.reshard_after_forward`."""
    names = (word.partition("=")[0][2:].replace("-", "_") for word in line if word.startswith("--"))
    return frozenset(re.sub(r"(^|\.)no_", r"\1", name) for name in names)


def overview() -> str:
    """`shardpair --help`: every command on one screen, by what one wants to do."""
    lines = [HEAD, ""]
    for group, others in OTHERS.items():
        studies = {word: study.brief for word, study in STUDIES.items() if study.group == group}
        briefs = studies | {word: brief for word, (_, brief) in others.items()}
        lines += [f"{group}:", *(f"  {word:<12} {brief}" for word, brief in briefs.items())]
    return "\n".join([*lines, TAIL])
