"""A study: one question, declared in one file of compare/studies.

A study is a class. Its docstring is its help, its fields are its flags; it says which cases are timed, and
what their figures mean, as `Findings`. The rest is the same for all, and stands here: the plan of --dry_run,
fresh processes in rounds whose order rotates, what --continue goes on with and refuses, Ctrl-C, tables on
stdout, a page, JSON. `studies.registry` names the studies; `shardpair report` reads what any of them left.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from compare.commands.arguments import Spec
from compare.contract.timing import Timing
from compare.execute.launch import EngineError
from compare.execute.paths import PICTURES, check_output
from compare.execute.progress import Reporter
from compare.host.tensors import RecordError
from compare.judge.bench_agreement import mistakes
from compare.judge.outcome import OUTCOME, Outcome, TimedCase, read_outcome
from compare.present.bench_words import warnings
from compare.show.findings import Figure, Findings, Table
from compare.show.page import show
from compare.spec.experiment import Experiment, ExperimentError, edited, revalidate, to_toml
from compare.studies.bench_cases import layout_name
from compare.studies.cases import Case, Settings
from compare.studies.rounds import RoundsInterrupted, continue_rounds, plan_rounds, run_rounds
from compare.terminal.console import errors_console

STANDARD = Timing()
Edits = Mapping[str, Mapping[str, object]]
Cases = tuple[list[TimedCase], dict[str, str]]
"""What is timed; and what is left out, by name, with the reason."""


class Study(Spec, frozen=True, kw_only=True):
    """A question that is answered by timing cases in rounds. A subclass has a docstring of its own."""

    rounds: int = 5
    """How often each case is timed. From fewer than five rounds no interval can be told."""
    window: int = STANDARD.window
    """Steps of a window, inside of which nothing waits for the devices."""
    windows: int = STANDARD.windows
    """Windows of a process."""
    anyway: bool = False
    """Time on a busy machine, too; the record then says so."""
    picture: Path | None = None
    """Also save the pictures as one file (.png, .svg, .pdf)."""

    brief: ClassVar[str]
    """A line of `shardpair --help`."""
    default: ClassVar[str] = "demo"
    """The experiment if none is named."""
    decided: ClassVar[Mapping[str, str]] = {"train.max_iters": "--window and --windows"}
    """Flags of the experiment that have no effect, and what decides instead."""
    layouts: ClassVar[str] = ""
    """Why flags of the layout have no effect; '' if they have."""

    def cases(self, experiment: Experiment) -> Cases:
        """What is timed of the experiment with the user's overrides. Raises ExperimentError."""
        raise NotImplementedError

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """What an outcome says; see `findings_of`.

        Args:
            outcome: with at least one measurement.
            folder: where it is, with what `measure_beside` left.

        Raises:
            EngineError, RecordError: there is not enough of it to say anything.
        """
        raise NotImplementedError

    @staticmethod
    def case(
        engine: str, experiment: Experiment, edits: Edits, *, size: str = "", variant: str = ""
    ) -> TimedCase:
        """A case of an experiment with other values in some fields. Raises ExperimentError.

        Args:
            engine: which.
            experiment: with the user's overrides.
            edits: fields and their values by section.
            size, variant: its name, as of `TimedCase`.
        """
        whole, layout = revalidate(edited(experiment, edits)), layout_name(experiment.layout)
        return TimedCase(engine=engine, layout=layout, size=size, variant=variant, experiment=whole)

    @classmethod
    def measure_beside(cls, outcome: Outcome, folder: Path, *, settings: Settings, quiet: bool) -> None:
        """Measure what the findings need beside the rounds, once; nothing by default."""

    @classmethod
    def word(cls) -> str:
        """The word of the command line."""
        return cls.__name__.lower()

    @property
    def gives_layouts(self) -> bool:
        """True if cases have layouts of their own: the experiment's need not work by itself."""
        return bool(self.layouts)

    @property
    def timing(self) -> Timing:
        """Of a process's steps."""
        return Timing(window=self.window, windows=self.windows)

    def __call__(self, default: Experiment) -> int:
        """Answer it. Returns 0 if every case finished, did the same work, and states its true time."""
        check_output("--picture", self.picture, kinds=PICTURES)
        if self.dry_run:
            planned = self.planned(default)
            cases = [
                Case(name=one.name, engine=one.engine, experiment=one.experiment) for one in planned.cases
            ]
            return self.show_plan(planned.experiment, cases, planned.left_out)
        try:
            result, folder = self.outcome(default)
        except RoundsInterrupted as interrupt:
            with contextlib.suppress(EngineError, RecordError):  # too little of it
                self.show(read_outcome(interrupt.folder), interrupt.folder)
            raise
        return self.show(result, folder)

    def show(self, outcome: Outcome, folder: Path) -> int:
        """Print an outcome and leave its page. Returns as `__call__`."""
        return show_outcome(type(self), outcome, folder, picture=self.picture, as_json=self.json)

    def outcome(self, default: Experiment) -> tuple[Outcome, Path]:
        """Measure, from the beginning or what --continue still lacks; nothing is printed on stdout."""
        settings, reporter = self.settings(), Reporter(quiet=self.quiet)
        if self.continue_:
            self._require_only_continue(default)
            folder = Path(self.continue_)
            self._require_mine(folder)
            result = continue_rounds(folder, anyway=self.anyway, settings=settings, reporter=reporter)
        else:
            planned = self.planned(default)
            for name, why in planned.left_out.items() if not self.quiet else ():
                errors_console().print(f"{name} is left out: {why}", style="yellow")
            result, folder = run_rounds(planned, run_dir=self.run_dir, settings=settings, reporter=reporter)
        settings = msgspec.structs.replace(settings, platform=result.platform)
        self.measure_beside(result, folder, settings=settings, quiet=self.quiet)
        return result, folder

    def planned(self, default: Experiment) -> Outcome:
        """The study before anything starts. Raises ExperimentError for what has no effect, or cannot be."""
        self.refuse_init_from("the time of a step does not depend on the weights")
        if self.layouts:
            self.refuse_layout(self.layouts)
        for flag, instead in self.decided.items():
            if flag in self.given:
                section, _, field = flag.partition(".")
                value = getattr(getattr(self, section), field)
                raise ExperimentError(f"--{flag} {value} has no effect: it follows from {instead}")
        experiment = self.resolved(is_spread=not self.gives_layouts)
        cases, left_out = self.cases(experiment)
        return plan_rounds(
            self.command,
            f"{self.command}-{Path(self.experiment).stem}",
            experiment,
            cases,
            timing=self.timing,
            rounds=self.rounds,
            anyway=self.anyway,
            settings=self.settings(),
            baseline=self.divisor(),
            left_out=left_out,
        )

    def divisor(self) -> str:
        """What others are divided by: see `Outcome.baseline`; '' for the default."""
        return ""

    def _require_only_continue(self, default: Experiment) -> None:
        """Refuse what --continue would ignore: every flag that says what is measured."""
        own = [
            field
            for field in msgspec.structs.fields(self)
            if field.name not in {*Spec.__struct_fields__, "anyway", "picture"}
        ]
        given = {
            field.name: field.name in self.given or (not field.default and getattr(self, field.name))
            for field in own
        }
        self.require_nothing_else(default, **given)

    def _require_mine(self, folder: Path) -> None:
        """Refuse the folder of another study. Raises ExperimentError."""
        if (study := read_outcome(folder).study) != self.command:
            raise ExperimentError(f"--continue {folder}: it is another study: `shardpair {study}` goes on")


def show_outcome(
    study: type[Study], outcome: Outcome, folder: Path, *, picture: Path | None, as_json: bool
) -> int:
    """Print what a study's outcome says, and leave its page. Returns the exit code."""
    found = findings_in(study, outcome, folder)
    return show(found, folder, page=f"{study.word()}.html", picture=picture, as_json=as_json)


def findings_in(study: type[Study] | Study, outcome: Outcome, folder: Path) -> Findings:
    """What an outcome says, even if it is that nothing was measured. Raises EngineError, RecordError."""
    if outcome.measurements:
        return study.findings(outcome, folder)
    return findings_of(outcome, title=outcome.name, sentence="nothing was measured", tables=[], rows=[])


def findings_of(
    outcome: Outcome,
    *,
    title: str,
    sentence: str,
    tables: Sequence[Table],
    rows: object,
    about: Sequence[str] = (),
    figures: Sequence[Figure] = (),
    details: Sequence[Table] = (),
    **value: object,
) -> Findings:
    """Findings with what is the same for every study: what spoils them, where and when, the verdict, JSON.

    Args:
        outcome: of the study.
        title, sentence, tables, about, figures, details: as of `Findings`.
        rows: what the tables are made of, for JSON.
        value: more for JSON, by name.
    """
    spoiled = warnings(outcome)
    return Findings(
        title=title,
        sentence=sentence,
        value={"rows": rows, **value, "warnings": spoiled, "result": outcome},
        passed=bool(outcome.measurements) and not outcome.failures and not mistakes(outcome),
        about=about,
        warnings=spoiled,
        tables=tables,
        details=details,
        figures=figures,
        left_out=outcome.left_out,
        spec=to_toml(outcome.experiment),
        source=f"{outcome.circumstances.words} Every single value is in {OUTCOME} beside this page.",
    )
