"""Flags that several commands share: Pythons and hosts, an experiment with overrides, a layout, engines."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
import tyro
from msgspec import Struct

from compare.contract.request import Platform
from compare.execute.launch import EnvironmentMissing
from compare.execute.launchers import Hosts, Launcher, find_hosts
from compare.execute.pythons import why_not_python
from compare.formats.nanogpt import load_experiment
from compare.setup.presets import PRESETS, check_names, spread
from compare.spec.engines.registry import ENGINES, SIDES, STUDIED
from compare.spec.experiment import (
    Checkpoints,
    Data,
    Experiment,
    ExperimentError,
    Layout,
    Model,
    Optimizer,
    Precision,
    Train,
    named_experiments,
)

DEVICES = 4
T = TypeVar("T")
Hidden = Annotated[T, tyro.conf.Fixed, tyro.conf.Suppress]
"""A field that no flag sets."""


if TYPE_CHECKING:
    EngineName = StudiedName = str
else:
    EngineName = Literal[tuple(ENGINES)]
    StudiedName = Literal[tuple(STUDIED)]


def _described(section: type[Struct]) -> object:
    """A section's docstring over its flags, given to tyro, which would parse the source of each for it."""
    return tyro.conf.arg(help=" ".join((section.__doc__ or "").split()))


def _help(text: str) -> object:
    return tyro.conf.arg(help=text)


JaxPython = Annotated[str, _help("Python that runs jaxpar.")]
TorchPython = Annotated[str, _help("Python that runs torchpar.")]
LauncherName = Annotated[
    Launcher,
    _help(
        "How engines start. local: on this machine. slurm: with `srun` on the hosts of this allocation "
        "(`salloc`, `sbatch`), which must share the folder of the results. torchrun: on the hosts of "
        "--hostfile, of which this is the first; the commands for the other hosts are printed."
    ),
]
HostFile = Annotated[Path | None, _help("Hosts for --launcher torchrun, one in a line: `host0 slots=4`.")]
HostCount = Annotated[
    int,
    _help(
        "Number of hosts. Default: all of the allocation or the file, else 1. With --launcher local: "
        "simulate this many hosts on one machine (for tests)."
    ),
]
LauncherOptions = Annotated[
    str,
    _help(
        "More options of `srun`, for --launcher slurm, such as "
        '--launcher_options="--container-image=IMAGE --gpu-bind=none". They cannot change the tasks or their '
        "order."
    ),
]
OnPlatform = Annotated[
    Platform,
    _help("cpu: XLA host devices, and gloo ranks of one thread each. gpu: one device or rank for each GPU."),
]
RunDir = Annotated[str, _help("New folder for the results. Default: runs/NAME-TIME.")]
Timeout = Annotated[
    float,
    _help(
        "Seconds that a step may take; then the engine is ended. Start-up and compilation may take longer "
        "while they use the CPU."
    ),
]
Quiet = Annotated[bool, _help("Print no progress on stderr.")]
PresetName = Annotated[
    str,
    _help(
        f"Layout by name: {', '.join(PRESETS)}. It sets the degrees; other --layout flags, such as "
        "--layout.microbatches, win over it."
    ),
]
PresetNames = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        metavar="PRESET...", help=f"Layouts by name: {', '.join(PRESETS)}; check and ledger also take `all`."
    ),
]
AsJson = Annotated[bool, _help("Print one JSON object on stdout instead of tables: see docs/records.md.")]


class SidePythons(Struct, frozen=True, kw_only=True):
    """A Python for each side."""

    jax_python: JaxPython = sys.executable
    torch_python: TorchPython = sys.executable


class HostFlags(SidePythons, frozen=True, kw_only=True):
    """Hosts, devices and folder of a measurement."""

    launcher: LauncherName = "local"
    hostfile: HostFile = None
    hosts: HostCount = 0
    launcher_options: LauncherOptions = ""
    platform: OnPlatform = "cpu"
    run_dir: RunDir = ""
    timeout_s: Timeout = 600.0
    quiet: Quiet = False
    json: AsJson = False


def hosts_of(arguments: Any, *, dry_run: bool = False) -> Hosts:
    """The hosts that the flags ask for. Raises ExperimentError: as `find_hosts`."""
    flags = arguments.launcher, arguments.hosts, arguments.hostfile
    return find_hosts(*flags, options=arguments.launcher_options, dry_run=dry_run)


def pythons_of(arguments: Any) -> dict[str, str]:
    """Side -> the interpreter that its flag names."""
    return {side.name: getattr(arguments, side.python_flag) for side in SIDES.values()}


def find_pythons(arguments: Any) -> dict[str, str]:
    """Find the interpreter of each side, and try it unless it is this one.

    Raises:
        ExperimentError: there is no such program.
        EnvironmentMissing: it is no Python, or shardpair is not installed there.
    """
    pythons = pythons_of(arguments)
    for name, python in pythons.items():
        flag = f"--{SIDES[name].python_flag}"
        if not shutil.which(python):
            raise ExperimentError(f"{flag} {python}: no such program; give the path of a Python")
        if python != sys.executable and (why := why_not_python(SIDES[name], python)):
            raise EnvironmentMissing(f"{flag} {python}: {why}")
    return pythons


class ExperimentFlags(Struct, frozen=True, kw_only=True):
    """An experiment: a name or a file, with any field overridden by a flag."""

    default: ClassVar[str] = "demo"
    """The experiment if none is named."""

    experiment: Annotated[
        str,
        tyro.conf.Positional,
        tyro.conf.arg(
            metavar="EXPERIMENT",
            help=f"Always the first word: a named experiment ({', '.join(named_experiments())}), a TOML "
            "file, or one of nanoGPT's config files, such as config/train_shakespeare_char.py (read, never "
            "run).",
        ),
    ] = "demo"
    model: Annotated[Model, _described(Model)] = Model()
    data: Annotated[Data, _described(Data)] = Data()
    optimizer: Annotated[Optimizer, _described(Optimizer)] = Optimizer()
    train: Annotated[Train, _described(Train)] = Train()
    precision: Annotated[Precision, _described(Precision)] = Precision()
    layout: Annotated[Layout, _described(Layout)] = Layout()
    checkpoint: Annotated[Checkpoints, _described(Checkpoints)] = Checkpoints()
    json: AsJson = False
    given: Hidden[frozenset[str]] = frozenset()
    """Flags of the command line: see `cli.flags_in`."""
    line: Hidden[str] = ""
    """The command line; '' from Python."""

    @property
    def fields_given(self) -> frozenset[str]:
        """Fields of the experiment that flags set, such as `layout.tp`."""
        return frozenset(name for name in self.given if "." in name)

    @property
    def layout_flags(self) -> frozenset[str]:
        """Fields of the layout that flags set."""
        return frozenset(name.removeprefix("layout.") for name in self.given if name.startswith("layout."))

    @classmethod
    def default_experiment(cls, name: str) -> Experiment:
        """The experiment that the flags override. Raises ExperimentError: there is none of this name."""
        return load_experiment(name)

    def resolve(self) -> Experiment:
        """The experiment with the flags in it, checked except for its layout, which a preset may replace.

        Raises ExperimentError.
        """
        experiment = Experiment(**{name: getattr(self, name) for name in Experiment.__struct_fields__})
        spread(experiment, "single")
        return experiment


class StudyFlags(ExperimentFlags, frozen=True, kw_only=True):
    """An experiment, and `HostFlags`, whose fields it repeats: a struct has fields from one base only."""

    jax_python: JaxPython = sys.executable
    torch_python: TorchPython = sys.executable
    launcher: LauncherName = "local"
    hostfile: HostFile = None
    hosts: HostCount = 0
    launcher_options: LauncherOptions = ""
    platform: OnPlatform = "cpu"
    run_dir: RunDir = ""
    timeout_s: Timeout = 600.0
    quiet: Quiet = False


Flags = TypeVar("Flags", bound=ExperimentFlags)


def defaults_for(command: type[Flags], name: str) -> Flags:
    """A command's flags with a named experiment or file as their defaults."""
    return msgspec.convert(
        {"experiment": name, **msgspec.to_builtins(command.default_experiment(name))}, command
    )


def chosen_engines(engines: tuple[str, ...]) -> list[str]:
    """The named engines; by default all but the peers. Raises ExperimentError: one is named twice."""
    check_names("--engines", "engine", engines, ENGINES)
    return list(engines) or list(STUDIED)
