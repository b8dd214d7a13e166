"""The command line: which command, which defaults, which exit code.

Exit codes: 0 all is well; 1 the comparison failed or an engine did; 2 bad usage or a bad experiment;
3 this machine lacks something; 130 Ctrl-C.
"""

import os
import sys
from typing import Annotated

import tyro

from compare.arguments import Spec, defaults_for
from compare.commands.check import Check
from compare.commands.doctor import Doctor
from compare.commands.faults import Faults
from compare.commands.matrix import Matrix
from compare.commands.mirror import Mirror
from compare.commands.report import Report
from compare.commands.run import Run
from compare.commands.schedule import Draw
from compare.console import errors_console
from compare.contract.experiment import ExperimentError, load
from compare.contract.tensors import RecordError
from compare.launch import EngineError, EnvironmentMissing

DEFAULT_EXPERIMENT = {"run": "demo", "check": "check", "faults": "check", "matrix": "check"}

DESCRIPTION = """Sharded training in JAX and in PyTorch, side by side: proven equal, measured, explained.

Begin with `shardpair run` (a minute), then `shardpair run --help` for everything you can override."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    errors = errors_console()
    try:
        return _dispatch(arguments)
    except ExperimentError as error:
        errors.print(f"shardpair: error: {error}", style="red")
        return 2
    except RecordError as error:
        errors.print(f"shardpair: error: {error}", style="red")
        return 2
    except EnvironmentMissing as error:
        errors.print(f"shardpair: error: {error}", style="red")
        return 3
    except EngineError as error:
        errors.print(f"shardpair: error: {error}", style="red")  # its log was shown when it failed
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        errors.print(f"shardpair: {interrupt or 'interrupted; every process was ended'}", style="red")
        return 130
    except BrokenPipeError:  # `shardpair ... | head`: nobody reads on, and nothing went wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        errors.print(f"shardpair: error: {error.filename}: {error.strerror}", style="red")
        return 2


def _dispatch(arguments: list[str]) -> int:
    name = _experiment_name(arguments)
    commands = (
        Annotated[Run, tyro.conf.subcommand("run", default=defaults_for(Run, name))]
        | Annotated[Check, tyro.conf.subcommand("check", default=defaults_for(Check, name))]
        | Annotated[Faults, tyro.conf.subcommand("faults", default=defaults_for(Faults, name))]
        | Annotated[Matrix, tyro.conf.subcommand("matrix", default=defaults_for(Matrix, name))]
        | Annotated[Report, tyro.conf.subcommand("report")]
        | Annotated[Doctor, tyro.conf.subcommand("doctor")]
        | Annotated[Draw, tyro.conf.subcommand("schedule")]
        | Annotated[Mirror, tyro.conf.subcommand("mirror")]
    )
    command = tyro.cli(
        commands, args=arguments, prog="shardpair", description=DESCRIPTION, use_underscores=True
    )
    if isinstance(command, Spec) and command.experiment != name:
        raise ExperimentError(f"give the experiment first: shardpair {arguments[0]} {command.experiment} ...")
    return command(load(name))


def _experiment_name(arguments: list[str]) -> str:
    """The experiment that gives the defaults: known before the other arguments can be read."""
    command, following = (arguments[0], arguments[1:2]) if arguments else ("", [])
    if command in DEFAULT_EXPERIMENT and following and not following[0].startswith("-"):
        return following[0]
    return DEFAULT_EXPERIMENT.get(command, "demo")
