"""Arguments that several commands share: an experiment with overrides, and how to run it."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec
import tyro
from msgspec import Struct

from compare.contract.request import Platform
from compare.execute.paths import check_cache, default_cache
from compare.execute.progress import Reporter
from compare.flags.hosts import HostFlags
from compare.flags.pythons import checked_pythons
from compare.judge.comparison import COMPARISON, Comparison
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
from compare.studies.cases import Case, Settings
from compare.studies.dry_run import plan, show
from compare.studies.nanogpt_config import layout_fields, load_experiment
from compare.studies.paired_run import compare_cases, continue_cases
from compare.studies.presets import SPREAD, Said, check_names, layout_flag, settings_in, spread
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

    def settings(self) -> Settings:
        """The `Settings` of `compare_cases`.

        Raises:
            ExperimentError: wrong time-out, unwritable cache, a Python that does not exist, or no such hosts.
        """
        check_timeout(self.timeout_s)
        return Settings(
            platform=self.platform,
            timeout_s=self.timeout_s,
            cache_dir=self._cache(),
            pythons=checked_pythons(self),
            hosts=self.found_hosts(),
            init_from=self.init_from,
        )

    def _cache(self) -> str:
        """The folder for compiled programs. One that was not asked for may be missing: then it is said."""
        try:
            check_cache(self.cache_dir)
        except ExperimentError as error:
            if self.cache_dir != default_cache():
                raise
            messages_console(quiet=self.quiet).print(f"compiled programs are not kept: {error}")
            return ""
        return self.cache_dir

    def refuse_layout(self, why: str, fields: Iterable[str] = SPREAD) -> None:
        """Refuse flags of the layout to a command that gives these fields itself.

        Raises:
            ExperimentError: one of them was given, saying `why` it has no effect.
        """
        for key in fields:
            if key in self.said.flags:
                raise ExperimentError(
                    f"{layout_flag(key, getattr(self.layout, key))} has no effect: {why}; leave it out, or "
                    f"use `shardpair run`"
                )

    def refuse_init_from(self, why: str) -> None:
        """Refuse --init_from for a command that has no use for it. Raises ExperimentError, saying `why`."""
        if self.init_from:
            raise ExperimentError(
                f"--init_from {self.init_from}: {why}; leave it out, or use `shardpair run` or `check`"
            )

    def compare(
        self,
        name: str,
        experiment: Experiment,
        cases: list[Case],
        *,
        run_dir: str = "",
        settings: Settings | None = None,
        needs_first: bool = True,
        left_out: Mapping[str, str] | None = None,
    ) -> tuple[Comparison, Path]:
        """`compare_cases`, or `continue_cases` where --continue was given.

        Args:
            name, experiment, cases, needs_first, left_out: as for `compare_cases`.
            run_dir: folder of the results, or of those to go on with; --run_dir or --continue by default.
            settings: `self.settings()` by default.
        """
        settings, reporter = settings or self.settings(), Reporter(quiet=self.quiet)
        folder = Path(run_dir or self.continue_)
        if self.continue_ and (not run_dir or (folder / COMPARISON).is_file()):
            comparison = continue_cases(folder, settings=settings, reporter=reporter, needs_first=needs_first)
            return comparison, folder
        return compare_cases(
            name,
            experiment,
            cases,
            command=self.command,
            run_dir=run_dir or self.run_dir,
            settings=settings,
            reporter=reporter,
            needs_first=needs_first,
            left_out=left_out,
        )

    def show_plan(
        self,
        experiment: Experiment,
        cases: list[Case],
        left_out: dict[str, str] | None = None,
        *,
        resume: str = "",
    ) -> int:
        """Print the plan of --dry_run. Returns the exit code: 0, or 2 if the command would be refused.

        Raises:
            ExperimentError: --continue beside it, bad settings or bad data.
        """
        if self.continue_:
            raise ExperimentError(
                f"--dry_run is for a new run, and --continue {self.continue_} goes on with an old one: give "
                f"one of them"
            )
        hosts = self.settings().hosts
        planned = plan(
            experiment,
            cases,
            platform=self.platform,
            left_out=left_out or {},
            hosts=hosts,
            init_from=self.init_from,
            resume=resume,
        )
        return show(planned, as_json=self.json)

    def overrides(self, default: Experiment) -> list[str]:
        """The flags that give fields of the experiment, for messages."""
        sections = tuple(f"{name}." for name in Experiment.__struct_fields__)
        flags = [f"--{name}" for name in sorted(self.given) if name.startswith(sections)]
        differs = not flags and self.resolved(is_spread=False) != default  # as from Python
        return ["another experiment"] if differs else flags

    def require_nothing_else(self, default: Experiment, **given: object) -> None:
        """Refuse what --continue would ignore.

        Args:
            default: the experiment before the user's overrides.
            given: other arguments by name, that say what is to be run.

        Raises:
            ExperimentError: one of them was given beside --continue.
        """
        given = {"run_dir": self.run_dir, "init_from": self.init_from, **given}
        others = [f"--{name}" for name, value in given.items() if value]
        others += self.overrides(default)
        if self.continue_ and others:
            raise ExperimentError(
                f"--continue {self.continue_} goes on with what was asked for there: leave out "
                f"{', '.join(others)}"
            )


class FixedExperiment(Spec, frozen=True, kw_only=True):
    """A command whose experiment is its own: no flag gives a field of it but the layout's."""

    experiment: Hidden[str] = ""
    model: Hidden[Model] = Model()
    data: Hidden[Data] = Data()
    optimizer: Hidden[Optimizer] = Optimizer()
    train: Hidden[Train] = Train()
    precision: Hidden[Precision] = Precision()
    checkpoint: Hidden[Checkpoints] = Checkpoints()
    init_from: Hidden[str] = ""


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
