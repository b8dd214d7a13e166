"""Flags that several commands share: Pythons and hosts, an experiment with overrides, a layout, engines."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeVar

import msgspec
import tyro
from msgspec import Struct

from compare.contract.request import Platform
from compare.execute.folders import default_cache
from compare.execute.launch import EnvironmentMissing
from compare.execute.launchers import Hosts, Launcher, find_hosts
from compare.execute.pythons import why_not_python
from compare.formats.nanogpt_config import layout_fields, load_experiment
from compare.setup.fitting import fitting
from compare.setup.presets import (
    PRESETS,
    Said,
    check_names,
    check_presets,
    preset_layout,
    settings_in,
    spread,
)
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
    revalidate,
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
        "Seconds without progress after which an engine is ended. A step must end in this time; before the "
        "first step it is enough that the engine uses the processor, for example to compile."
    ),
]
Quiet = Annotated[bool, _help("Print no progress on stderr.")]
AsJson = Annotated[bool, _help("Print one JSON object on stdout instead of tables.")]


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


def hosts_of(arguments: "HostFlags | Spec") -> Hosts:
    """The hosts that the flags ask for. Raises ExperimentError: as `find_hosts`."""
    flags = arguments.launcher, arguments.hosts, arguments.hostfile
    return find_hosts(*flags, options=arguments.launcher_options)


def pythons_of(arguments: "SidePythons | Spec") -> dict[str, str]:
    """Side -> the interpreter that its flag names."""
    return {side.name: getattr(arguments, side.python_flag) for side in SIDES.values()}


def checked_pythons(arguments: "SidePythons | Spec") -> dict[str, str]:
    """`pythons_of`, each tried unless it is this one.

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
    """An experiment (a name or a file, and any field of it overridden)."""

    default: ClassVar[str] = "demo"
    """The experiment if none is named."""

    experiment: Annotated[str, tyro.conf.Positional] = "demo"
    """A named experiment (demo, check, cpu, baby-gpt, gpt2-124m, gpt2-350m, golden), a TOML file, or one of
    nanoGPT's config files, such as config/train_shakespeare_char.py: parsed, never executed. Give it
    first."""
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
    """The command line itself; '' from Python."""
    written: Hidden[frozenset[str]] = frozenset()
    """What the experiment's file says of the layout: see `settings_in`."""

    @property
    def said(self) -> Said:
        """What the user said of the layout: it wins over the settings of a preset."""
        flags = (name.removeprefix("layout.") for name in self.given if name.startswith("layout."))
        return Said(flags=frozenset(flags), file=self.written)

    @property
    def layout_flags(self) -> frozenset[str]:
        """Fields of the layout that the command line gives."""
        return self.said.flags

    @classmethod
    def default_experiment(cls, name: str) -> Experiment:
        """The experiment that the flags override. Raises ExperimentError: there is none of this name."""
        return load_experiment(name)

    @classmethod
    def layout_written(cls, name: str) -> frozenset[str]:
        """What this experiment's file says of the layout. Raises ExperimentError: as `default_experiment`."""
        return settings_in(cls.default_experiment(name).layout, layout_fields(name))

    def resolved(self) -> Experiment:
        """The experiment with the overrides in it, checked but for its own layout, over which presets may not
        spread it. Raises ExperimentError.
        """
        experiment = Experiment(**{name: getattr(self, name) for name in Experiment.__struct_fields__})
        spread(experiment, "single")
        return experiment


class Spec(ExperimentFlags, frozen=True, kw_only=True):
    """An experiment, and how to run it."""

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
    continue_: Annotated[str, tyro.conf.arg(name="continue", metavar="RUN_DIR")] = ""
    """Go on with a run that was interrupted, or whose engines failed: run what is missing in this
    folder, as it was asked for there."""
    init_from: str = ""
    """Begin with these weights instead of the seed's (run, check, sweep): a safetensors file with shardpair's
    or nanoGPT's names, or what `shardpair convert` reads; nothing in it can execute."""
    cache_dir: str = default_cache()
    """Programs that JAX compiled are kept here between runs; '' turns that off. Those for several devices of
    a CPU never are: XLA loses the order of their collectives."""
    dry_run: bool = False
    """Start nothing: print the resolved experiment, the layout in words, memory per device, and what is
    refused. The exit code is then that of the run: 2, or 3 if this machine lacks something."""

    @property
    def command(self) -> str:
        """Word of the command line that makes such a comparison, and goes on with it."""
        return type(self).__name__.lower()

    def laid_out(self, experiment: Experiment) -> Experiment:
        """The experiment, with the user's overrides in it, under the layout that other flags choose."""
        return experiment


class Spread(Spec, frozen=True, kw_only=True):
    """An experiment, a layout by name, and engines that can express it."""

    engines: tuple[EngineName, ...] = ()
    """Which engines, the first being what the others are held against. Default: all that can express
    the layout; the others are named, with the reason. A peer runs if it is named, and is left out, with the
    line that installs it, where it is missing."""
    preset: str = ""
    """A layout by name: single, ddp, ddp_naive, ddp_flat, ddp_overlapped, zero1, zero2, fsdp, shard_grad_op,
    hsdp, tp, tp_sp, ddp_tp, fsdp_tp, fsdp_tp_sp, hsdp_tp, pp, pp_gpipe, pp_interleaved, pp_zero_bubble,
    ddp_pp, fsdp_pp, tp_pp, ddp_tp_pp, fsdp_tp_pp. It gives the degrees; what you say of the rest, such as
    --layout.microbatches or --layout.schedule, wins."""
    devices: int | None = None
    """How many devices --preset spreads over. Default: 4 for most, 2 or 8 for some: see `shardpair list`."""

    def laid_out(self, experiment: Experiment) -> Experiment:
        """Under --preset, if one was given; checked.

        Raises:
            ExperimentError: a preset that does not fit, or devices without one.
        """
        if self.devices is not None and not self.preset:
            raise ExperimentError(
                f"--devices {self.devices} without --preset has no effect: say how they are used, with "
                f"--preset or with the layout's degrees, such as --layout.dp_replicate {self.devices}"
            )
        if not self.preset:
            return revalidate(experiment)
        check_names("--preset", "preset", [self.preset], PRESETS)
        devices = PRESETS[self.preset].devices if self.devices is None else self.devices
        if self.devices not in (None, 1) and not PRESETS[self.preset].axis:
            raise ExperimentError(f"--devices {devices} has no effect: --preset {self.preset} is one device")
        layout = preset_layout(experiment.layout, self.preset, devices, self.said)
        check_presets(f"--preset {self.preset}", experiment.layout, [(self.preset, devices)], self.said)
        return revalidate(msgspec.structs.replace(experiment, layout=layout))

    def chosen(self) -> tuple[EngineName, ...]:
        """The engines asked for; () for all that can express the layout."""
        return self.engines

    def fitting(self, experiment: Experiment) -> tuple[list[str], dict[str, str]]:
        """The engines to run, all that were asked for; and why others were left out.

        Raises ExperimentError: an engine is named twice, or none can express the layout.
        """
        engines = chosen_engines(self.chosen())
        return (list(engines), {}) if self.chosen() else fitting(engines, experiment.layout)


AnySpec = TypeVar("AnySpec", bound=ExperimentFlags)


def defaults_for(command: type[AnySpec], name: str) -> AnySpec:
    """A command's arguments filled from a named experiment or file: the defaults of its command line."""
    default = msgspec.to_builtins(command.default_experiment(name))
    written = list(command.layout_written(name))
    return msgspec.convert({"experiment": name, "written": written, **default}, command)


def chosen_engines(engines: tuple[str, ...]) -> list[str]:
    """The engines asked for; by default all but the peers. Raises ExperimentError if one is named twice."""
    check_names("--engines", "engine", engines, ENGINES)
    return list(engines) or list(STUDIED)
