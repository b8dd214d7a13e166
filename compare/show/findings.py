"""Findings: the sentences, tables and figures of a study, as data.

`show.terminal`, `show.page` and `show.markdown` turn `Findings` into text. --json prints `Findings.envelope`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from msgspec import Struct

from compare.judge.outcome import OUTCOME, Outcome
from compare.show.envelope import CaseState, Envelope, TextTable, states_of
from compare.show.figures import Figure
from compare.show.statistics import Estimate
from compare.spec.experiment import to_toml

NONE = "-"
Value = Estimate | float | str | None
R = TypeVar("R")


class Text(Struct, frozen=True):
    """A cell with its text, a small note for pages, and whether it is good or bad news."""

    text: str
    note: str = ""
    news: str = ""
    """pass, fail or ''."""


class Row(Struct, frozen=True):
    """A row with its header and its cells."""

    head: Text
    cells: list[Text]
    is_total: bool = False


class Table(Struct, frozen=True, kw_only=True):
    """A table whose rows and columns have headers."""

    name: str
    """Title, also for screen readers."""
    corner: str
    """Name of the rows."""
    columns: list[str]
    rows: list[Row]
    words: int = 0
    """Number of text columns, which are aligned at the left, before the number columns."""
    below: str = ""
    """A sentence under the table."""


class Column(Struct, Generic[R], frozen=True):
    """A column: its header, the figure of a row, and its format."""

    name: str
    of: Callable[[R], Value]
    form: str | Callable[[Any], str] = ""
    """A format such as `.1f`, or a function from a figure to text."""
    news: Callable[[R], str] | None = None
    """Whether a row's figure is good or bad news: 'pass', 'fail' or ''."""

    def cell(self, row: R) -> Text:
        """The cell of a row."""
        return Text(format_value(self.of(row), self.form), news=self.news(row) if self.news else "")


def format_value(value: Value, form: str | Callable[[Any], str] = "") -> str:
    """A figure as text: 1.2, 1.2 [1.1, 1.3] for an estimate with an interval, or `NONE`."""
    if value is None:
        return NONE

    def text_of(number: Any) -> str:
        return format(number, form) if isinstance(form, str) else form(number)

    if not isinstance(value, Estimate):
        return text_of(value)
    interval = f" [{text_of(value.low)}, {text_of(value.high)}]" if value.low is not None else ""
    return text_of(value.median) + interval


def by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """Reason -> the names that have it."""
    names: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names.setdefault(why, []).append(name)
    return names


def table_of(
    name: str,
    columns: Sequence[Column[R]],
    rows: Sequence[R],
    *,
    below: str = "",
    words: int = 0,
) -> Table:
    """A table of rows. The first column has their names. Columns without any figure are left out."""
    head, *figures = columns
    cells = {column.name: [column.cell(row) for row in rows] for column in figures}
    kept = {name: own for name, own in cells.items() if any(cell.text != NONE for cell in own)}
    return Table(
        name=name,
        corner=head.name,
        columns=list(kept),
        rows=[Row(head.cell(row), [own[place] for own in kept.values()]) for place, row in enumerate(rows)],
        below=below,
        words=words,
    )


class Link(Struct, frozen=True):
    """A page or a command that shows more."""

    words: str
    """Name of the page, or contents of the output of the command."""
    href: str = ""
    """Address of the page, relative to the page of the findings."""
    command: str = ""


class Findings(Struct, frozen=True, kw_only=True):
    """All output of a command."""

    study: str
    """Word of the command."""
    title: str
    sentence: str
    """The outcome in one line."""
    values: Mapping[str, Any]
    """Values of the command, for JSON."""
    passed: bool
    is_dry_run: bool = False
    cases: Mapping[str, CaseState] = {}
    folder: str = ""
    """Folder of the results; '' for none."""
    page: str = ""
    """HTML page that was written; '' for none."""
    about: Sequence[str] = ()
    """Sentences that explain the figures."""
    warnings: Sequence[str] = ()
    """Reasons not to trust the figures, one line each."""
    is_doubtful: bool = False
    """Whether the sentence depends on figures that a warning is about."""
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    more_figures: Sequence[Figure] = ()
    """Figures of the page that --picture leaves out."""
    missing: dict[str, str] = {}
    """Unfinished cases, and why."""
    continuation: str = ""
    """The command that runs the missing cases."""
    left_out: dict[str, str] = {}
    """Cases that cannot run, and why."""
    notes: Sequence[str] = ()
    links: Sequence[Link] = ()
    """Pages and commands that a page names."""
    spec: str = ""
    """The experiment with all fields, as TOML."""
    command: str = ""
    """The command line of the study."""
    source: str = ""
    """Version of shardpair, and the file with all values."""

    @property
    def envelope(self) -> Envelope:
        """The object that --json prints."""
        return Envelope(
            study=self.study,
            passed=self.passed,
            verdict=self.sentence,
            dry_run=self.is_dry_run,
            folder=self.folder,
            page=self.page,
            cases=dict(self.cases),
            tables=[
                TextTable(
                    name=table.name,
                    columns=[table.corner, *table.columns],
                    rows=[[row.head.text, *(cell.text for cell in row.cells)] for row in table.rows],
                )
                for table in self.tables
            ],
            warnings=list(self.warnings),
            notes=list(self.notes),
            missing=dict(self.missing),
            left_out=dict(self.left_out),
            values=dict(self.values),
        )


def findings_of(
    outcome: Outcome,
    *,
    sentence: str,
    title: str = "",
    passed: bool = True,
    values: Mapping[str, object] = {},
    cases: Mapping[str, CaseState] | None = None,
    **more: Any,
) -> Findings:
    """Findings with the parts that all studies have: experiment, machine, time, cases.

    A study passes only if no case is missing. `values` join the outcome in JSON. `cases` are by default the
    states of the outcome's. `more` are other fields of `Findings`.
    """
    incomplete = "" if outcome.is_complete or sentence.startswith("INCOMPLETE") else "INCOMPLETE: "
    versions = ", ".join(map(" ".join, outcome.circumstances.versions.items()))
    versions = f"{versions}. " if versions else ""
    return Findings(
        study=outcome.study,
        title=title or outcome.name,
        sentence=f"{incomplete}{sentence}",
        values={**values, "outcome": outcome},
        passed=passed and outcome.is_complete,
        missing=outcome.undone,
        continuation="" if outcome.is_complete else outcome.how_to_go_on(Path()),
        left_out=outcome.left_out,
        spec=to_toml(outcome.experiment),
        command=outcome.line,
        source=f"{outcome.circumstances.words} {versions}Every value is in {OUTCOME} beside this page.",
        cases=states_of(outcome) if cases is None else cases,
        **more,
    )


def verdict_findings(
    outcome: Outcome, *, passed: bool | None = None, sentence: str = "", **more: Any
) -> Findings:
    """Findings of cases that were compared, with the outcome's verdict; `more` as of `findings_of`."""
    passed = outcome.passed if passed is None else passed
    return findings_of(outcome, sentence=sentence or outcome.sentence(), passed=passed, **more)
