"""Arguments that several commands share: an experiment with overrides, and how to run it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec
import tyro
from msgspec import Struct

from compare.contract.request import Platform
from compare.execute.paths import check_cache, default_cache
from compare.flags.hosts import HostFlags
from compare.spec.engines.registry import ENGINES, STUDIED
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
from compare.studies.nanogpt_config import layout_fields, load_experiment
from compare.studies.presets import Said, check_names, settings_in, spread
from compare.terminal import messages_console

T = TypeVar("T")
Hidden = Annotated[T, tyro.conf.Fixed, tyro.conf.Suppress]
"""A field that no flag sets."""
MAX_TIMEOUT_S = 1_000_000.0  # eleven days; poll(2) counts milliseconds in 32 bits


if TYPE_CHECKING:
    EngineName = StudiedName = str
else:
    EngineName = Literal[tuple(ENGINES)]
    StudiedName = Literal[tuple(STUDIED)]


def _described(section: type[Struct]) -> object:
    """A section's docstring over its flags, given to tyro, which would parse the source of each for it."""
    return tyro.conf.arg(help=" ".join((section.__doc__ or "").split()))


class Spec(HostFlags, frozen=True, kw_only=True):
    """An experiment (a name or a file, and any field of it overridden), and how to run it."""

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
    platform: Platform = "cpu"
    """cpu: XLA host devices, and gloo ranks of one thread each. gpu: one device or rank for each GPU."""
    run_dir: str = ""
    """Folder of the results; must not exist. Default: runs/NAME-TIME."""
    continue_: Annotated[str, tyro.conf.arg(name="continue", metavar="RUN_DIR")] = ""
    """Go on with a run that was interrupted, or whose engines failed: run what is missing in this
    folder, as it was asked for there."""
    init_from: str = ""
    """Begin with these weights instead of the seed's (run, check, sweep): a safetensors file with shardpair's
    or nanoGPT's names, or nanoGPT's ckpt.pt, which nothing in can execute."""
    timeout_s: float = 600.0
    """An engine that hangs for this long is ended. A step has to end in this time; what goes before, like
    compiling, only has to use the processor."""
    cache_dir: str = default_cache()
    """Programs that JAX compiled are kept here between runs; '' turns that off. Those for several devices of
    a CPU never are: XLA loses the order of their collectives."""
    dry_run: bool = False
    """Start nothing: print the resolved experiment, the layout in words, memory per device, and what is
    refused. Exit code 2 if it would be refused."""
    quiet: bool = False
    """No progress on stderr."""
    picture: Path | None = None
    """Also save the pictures as one file (.png, .svg, .pdf)."""
    json: bool = False
    """Print the outcome as one JSON object on stdout instead of tables."""
    given: Hidden[frozenset[str]] = frozenset()
    """Flags of the command line: see `flags_given`."""
    written: Hidden[frozenset[str]] = frozenset()
    """What the experiment's file says of the layout: see `settings_in`."""

    @property
    def said(self) -> Said:
        """What the user said of the layout: it wins over the settings of a preset."""
        section = "layout."
        flags = (name.removeprefix(section) for name in self.given if name.startswith(section))
        return Said(flags=frozenset(flags), file=self.written)

    @property
    def command(self) -> str:
        """Word of the command line that makes such a comparison, and goes on with it."""
        return type(self).__name__.lower()

    @classmethod
    def default_experiment(cls, name: str) -> Experiment:
        """The experiment that the flags override. Raises ExperimentError: there is none of this name."""
        return load_experiment(name)

    @classmethod
    def layout_written(cls, name: str) -> frozenset[str]:
        """What this experiment's file says of the layout. Raises ExperimentError: as `default_experiment`."""
        return settings_in(cls.default_experiment(name).layout, layout_fields(name))

    def resolved(self, *, is_spread: bool = True) -> Experiment:
        """The experiment with the overrides in it, checked. Raises ExperimentError.

        Args:
            is_spread: over the devices of its layout. Else presets will spread it, over others: whether it
                could be over these is not asked.
        """
        experiment = Experiment(
            model=self.model,
            data=self.data,
            optimizer=self.optimizer,
            train=self.train,
            precision=self.precision,
            layout=self.layout,
            checkpoint=self.checkpoint,
        )
        if is_spread:
            return revalidate(experiment)
        spread(experiment, "single")
        return experiment

    def checked_cache(self) -> str:
        """The folder for compiled programs. One that was not asked for may be missing: then it is said."""
        try:
            check_cache(self.cache_dir)
        except ExperimentError as error:
            if self.cache_dir != default_cache():
                raise
            messages_console(quiet=self.quiet).print(f"compiled programs are not kept: {error}")
            return ""
        return self.cache_dir


AnySpec = TypeVar("AnySpec", bound=Spec)


def defaults_for(command: type[AnySpec], name: str) -> AnySpec:
    """A command's arguments filled from a named experiment or file: the defaults of its command line."""
    default = msgspec.to_builtins(command.default_experiment(name))
    written = list(command.layout_written(name))
    return msgspec.convert({"experiment": name, "written": written, **default}, command)


def check_timeout(seconds: float) -> None:
    """Refuse a time-out that is none. Raises ExperimentError."""
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise ExperimentError(f"--timeout_s {seconds} must be more than 0 and at most {MAX_TIMEOUT_S}")


def chosen_engines(engines: tuple[str, ...]) -> list[str]:
    """The engines asked for; by default all but the peers. Raises ExperimentError if one is named twice."""
    check_names("--engines", "engine", engines, ENGINES)
    return list(engines) or list(STUDIED)
