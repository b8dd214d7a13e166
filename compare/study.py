"""A study: one question, declared in one file of compare/studies.

A study is a class. Its docstring is its help, its fields are its flags; it says which cases are run, and what
their figures mean, as `Findings`. The rest is the same for all: the plan of --dry_run, what --continue goes
on with and refuses, the lock, Ctrl-C, tables on stdout, a page, JSON, the tables of docs. `TimedStudy` times
its cases in rounds; `Survey` measures each of its parts once. `studies.registry` names the studies;
`shardpair report` reads what any of them left.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from compare.execute.launch import EngineError
from compare.execute.paths import PICTURES, check_output
from compare.flags.arguments import Spec
from compare.host.tensors import RecordError
from compare.judge.outcome import OUTCOME, AnyOutcome, Outcome, StudyOutcome, read_outcome
from compare.show.findings import Figure, Findings, Table
from compare.show.page import show
from compare.spec.experiment import Experiment, ExperimentError, to_toml
from compare.studies.cases import Case, Interrupted
from compare.terminal import errors_console

Edits = Mapping[str, Mapping[str, object]]
"""Fields of an experiment and their values, by section."""
AnyStudyOutcome = TypeVar("AnyStudyOutcome", bound=StudyOutcome)


class Question(Generic[AnyOutcome]):
    """What every question has beside its flags."""

    brief: ClassVar[str]
    """A line of `shardpair --help`."""
    group: ClassVar[str] = "Measure"
    """Where it stands there."""
    default: ClassVar[str] = "demo"
    """The experiment if none is named."""
    kept: ClassVar[Any] = Outcome
    """Type of the outcome that it saves."""
    shows_unfinished: ClassVar[bool] = True
    """After Ctrl-C, print what is there."""

    @classmethod
    def findings(cls, outcome: AnyOutcome, folder: Path) -> Findings:
        """What an outcome says; see `findings_of`.

        Args:
            outcome: with at least one result.
            folder: where it is.

        Raises:
            EngineError, RecordError: there is not enough of it to say anything.
        """
        raise NotImplementedError

    @classmethod
    def word(cls) -> str:
        """The word of the command line."""
        return cls.__name__.lower()

    @classmethod
    def shown(cls, outcome: AnyOutcome, folder: Path, *, picture: Path | None, as_json: bool) -> int:
        """Print what an outcome says, and leave its page. Returns the exit code."""
        found = findings_in(cls, outcome, folder)
        return show(found, folder, page=f"{cls.word()}.html", picture=picture, as_json=as_json)

    @classmethod
    def judged_again(cls, outcome: AnyOutcome, folder: Path) -> tuple[AnyOutcome, list[str]]:
        """The outcome as the records in its folder give it now, and where that is not what was saved."""
        return outcome, []


class Study(Spec, Question[AnyStudyOutcome], frozen=True, kw_only=True):
    """A question about an experiment, its flags and its answer. A subclass has a docstring of its own."""

    decided: ClassVar[Mapping[str, str]] = {}
    """Flags of the experiment that have no effect, and what decides instead."""
    own_layouts: ClassVar[str] = ""
    """Why flags of the layout have no effect; '' if they have."""
    own_weights: ClassVar[str] = "it begins with the seed's weights"
    """Why --init_from has no effect; '' if it has."""
    alters_nothing: ClassVar[frozenset[str]] = frozenset({"picture"})
    """Own flags that may stand beside --continue."""

    def planned(self, default: Experiment) -> AnyStudyOutcome:
        """The study before anything starts. Raises ExperimentError for what has no effect, or cannot be."""
        raise NotImplementedError

    def cases_of(self, planned: AnyStudyOutcome) -> list[Case]:
        """What a plan runs, for --dry_run."""
        raise NotImplementedError

    def begun(self, planned: AnyStudyOutcome) -> tuple[AnyStudyOutcome, Path]:
        """Run a plan, in a new folder. Raises Interrupted: Ctrl-C; what is finished is saved."""
        raise NotImplementedError

    def continued(self, folder: Path) -> AnyStudyOutcome:
        """Run what the study in a folder still lacks. Raises as `begun`."""
        raise NotImplementedError

    @property
    def source(self) -> str:
        """Where the checkpoints are that it goes on from; '' to begin at step 0."""
        return ""

    @property
    def drawing(self) -> Path | None:
        """A file for its pictures, if it has any, and one was asked for."""
        return None

    @property
    def gives_layouts(self) -> bool:
        """True if cases have layouts of their own: the experiment's need not work by itself."""
        return bool(self.own_layouts)

    def __call__(self, default: Experiment) -> int:
        """Answer it. Returns 0 if the answer is whole and as it should be: `Findings.passed`."""
        check_output("--picture", self.drawing, kinds=PICTURES)
        if self.dry_run:
            planned = self.planned(default)
            return self.show_plan(
                planned.experiment, self.cases_of(planned), planned.left_out, resume=self.source
            )
        try:
            result, folder = self.outcome(default)
        except Interrupted as interrupt:
            if not self.shows_unfinished:
                raise
            with contextlib.suppress(EngineError, RecordError):  # too little of it
                self.show(read_outcome(interrupt.folder, self.kept), interrupt.folder)
            raise
        return self.show(result, folder)

    def show(self, outcome: AnyStudyOutcome, folder: Path) -> int:
        """Print an outcome and leave its page. Returns as `__call__`."""
        return self.shown(outcome, folder, picture=self.drawing, as_json=self.json)

    def outcome(self, default: Experiment) -> tuple[AnyStudyOutcome, Path]:
        """Measure, from the beginning or what --continue still lacks; nothing is printed on stdout."""
        if self.continue_:
            self._require_only_continue(default)
            folder = Path(self.continue_)
            self._require_mine(folder)
            return self.continued(folder), folder
        planned = self.planned(default)
        for name, why in planned.left_out.items() if not self.quiet else ():
            errors_console().print(f"{name} is left out: {why}", style="yellow")
        return self.begun(planned)

    def asked(self) -> Experiment:
        """The experiment with the overrides in it. Raises ExperimentError for flags that have no effect."""
        if self.own_weights:
            self.refuse_init_from(self.own_weights)
        if self.own_layouts:
            self.refuse_layout(self.own_layouts)
        for flag, instead in self.decided.items():
            if flag in self.given:
                section, _, field = flag.partition(".")
                value = getattr(getattr(self, section), field)
                raise ExperimentError(f"--{flag} {value} has no effect: it follows from {instead}")
        return self.resolved(is_spread=not self.gives_layouts)

    @property
    def title(self) -> str:
        """Name of its folder, and for people: bench-demo."""
        return f"{self.command}-{Path(self.experiment).stem}"

    @classmethod
    def own_flags(cls) -> list[str]:
        """Names of the flags that say what is measured, beyond the experiment's."""
        others = {*Spec.__struct_fields__, *cls.alters_nothing}
        return [name for name in cls.__struct_fields__ if name not in others]

    def _require_only_continue(self, default: Experiment) -> None:
        """Refuse what --continue would ignore: every flag that says what is measured."""
        defaults = {field.name: field.default for field in msgspec.structs.fields(self)}
        given = {
            name: name in self.given or (not defaults[name] and getattr(self, name))
            for name in self.own_flags()
        }
        self.require_nothing_else(default, **given)

    def _require_mine(self, folder: Path) -> None:
        """Refuse the folder of another study. Raises ExperimentError."""
        if (study := read_outcome(folder, Outcome).study) != self.command:
            raise ExperimentError(f"--continue {folder}: it is another study: `shardpair {study}` goes on")


class DrawnStudy(Study[AnyStudyOutcome], Generic[AnyStudyOutcome], frozen=True, kw_only=True):
    """A study with pictures."""

    picture: Path | None = None
    """Also save the pictures as one file (.png, .svg, .pdf)."""

    @property
    def drawing(self) -> Path | None:
        """--picture."""
        return self.picture


def findings_in(study: type[Question] | Question, outcome: Outcome, folder: Path) -> Findings:
    """What an outcome says, even if it is that nothing was measured. Raises EngineError, RecordError."""
    if not outcome.is_blank:
        return study.findings(outcome, folder)
    nothing = {"rows": [], "warnings": outcome.reasons, "result": outcome}
    return Findings(
        title=outcome.name,
        sentence="nothing was measured",
        value=nothing,
        passed=False,
        warnings=outcome.reasons,
        left_out=outcome.left_out,
    )


def findings_of(
    outcome: StudyOutcome,
    *,
    title: str,
    sentence: str,
    tables: Sequence[Table],
    rows: object,
    passed: bool,
    warnings: Sequence[str] = (),
    missing: Mapping[str, str] | None = None,
    about: Sequence[str] = (),
    figures: Sequence[Figure] = (),
    details: Sequence[Table] = (),
    **value: object,
) -> Findings:
    """Findings with what is the same for every study: what it was asked, where and when, JSON.

    Args:
        outcome: of the study.
        title, sentence, passed, warnings, missing, tables, about, figures, details: as of `Findings`.
        rows: what the tables are made of, for JSON.
        value: more for JSON, by name.
    """
    return Findings(
        title=title,
        sentence=sentence,
        value={"rows": rows, **value, "warnings": warnings, "result": outcome},
        passed=passed,
        about=about,
        warnings=warnings,
        tables=tables,
        details=details,
        figures=figures,
        missing=dict(missing or {}),
        left_out=outcome.left_out,
        spec=to_toml(outcome.experiment),
        source=f"{outcome.circumstances.words} Every single value is in {OUTCOME} beside this page.",
    )
