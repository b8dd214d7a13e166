"""What a study found, before anything is drawn: sentences, tables and figures as data.

A study makes one `Findings`; `show.terminal`, `show.page` and `show.markdown` each turn it into text, and
`Findings.value` is what --json prints.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from compare.judge.outcome import OUTCOME, Outcome
from compare.judge.statistics import Estimate
from compare.show.figures import Figure
from compare.spec.experiment import to_toml

NONE = "-"
Value = Estimate | float | str | None
R = TypeVar("R")


class Text(Struct, frozen=True, omit_defaults=True):
    """A cell: its text, a small note beside it, and whether it is good or bad news."""

    text: str
    note: str = ""
    news: str = ""
    """pass, fail or ''."""


class Row(Struct, frozen=True, omit_defaults=True):
    """A row: its header, and its cells."""

    head: Text
    cells: list[Text]
    is_total: bool = False


class Table(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A table whose rows and columns have headers."""

    name: str
    """Its title, and its name for those who cannot see it."""
    corner: str
    """What its rows are."""
    columns: list[str]
    rows: list[Row]
    look: str = ""
    """`words` for text that is set to the left; '' for numbers."""
    words: int = 0
    """Columns of text before those of numbers."""
    below: str = ""
    """A sentence under the table."""


class Column(Struct, Generic[R], frozen=True):
    """A figure that every row of a table has: its header, where it is found, how it is written."""

    name: str
    of: Callable[[R], Value]
    form: str | Callable[[Any], str] = ""
    """A format such as `.1f`, or what makes text of the figure."""
    news: Callable[[R], str] | None = None
    """Whether a row's figure is good or bad news: pass, fail or ''."""

    def cell(self, row: R) -> Text:
        """The cell of a row."""
        return Text(written(self.of(row), self.form), news=self.news(row) if self.news else "")


def written(value: Value, form: str | Callable[[Any], str] = "") -> str:
    """A figure as text: 1.2, or 1.2 [1.1, 1.3] of an estimate with an interval; `NONE` for none."""
    if value is None:
        return NONE

    def say(number: Any) -> str:
        return format(number, form) if isinstance(form, str) else form(number)

    if not isinstance(value, Estimate):
        return say(value)
    return say(value.median) + (f" [{say(value.low)}, {say(value.high)}]" if value.low is not None else "")


def by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """Names with the same reason together."""
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
    look: str = "",
    words: int = 0,
) -> Table:
    """A table of rows; the first column names them, and one without any figure is left out."""
    head, *figures = columns
    cells = {column.name: [column.cell(row) for row in rows] for column in figures}
    kept = {name: own for name, own in cells.items() if any(cell.text != NONE for cell in own)}
    return Table(
        name=name,
        corner=head.name,
        columns=list(kept),
        rows=[Row(head.cell(row), [own[place] for own in kept.values()]) for place, row in enumerate(rows)],
        below=below,
        look=look,
        words=words,
    )


class Findings(Struct, frozen=True, kw_only=True):
    """Everything that is shown of a study."""

    title: str
    sentence: str
    """The outcome in a line."""
    value: object
    """What --json prints."""
    passed: bool
    about: Sequence[str] = ()
    """Sentences that say what the figures are, where and when they were taken."""
    warnings: Sequence[str] = ()
    """What spoils the figures, a line each."""
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    more_figures: Sequence[Figure] = ()
    """For the page alone, and not for the picture of --picture."""
    missing: dict[str, str] = {}
    """What did not finish, by name, and why."""
    continuation: str = ""
    """The command that runs only what is missing."""
    left_out: dict[str, str] = {}
    """What could not be done, by name, and why."""
    notes: Sequence[str] = ()
    spec: str = ""
    """The experiment, every field spelled out."""
    command: str = ""
    """The command line that began it."""
    source: str = ""
    """Version of shardpair, and the files that have every single figure."""


def findings_of(
    outcome: Outcome,
    *,
    sentence: str,
    title: str = "",
    rows: object = (),
    value: Mapping[str, object] = {},
    passed: bool = True,
    warnings: Sequence[str] = (),
    **more: Any,
) -> Findings:
    """Findings with what is the same for every study: what it was asked, where and when, JSON.

    A study passes only if no case is missing. `rows` are what its tables are made of, and `value` is more for
    JSON; `more` are other fields of `Findings`.
    """
    incomplete = "" if outcome.is_complete or sentence.startswith("INCOMPLETE") else "INCOMPLETE: "
    versions = ", ".join(map(" ".join, outcome.circumstances.versions.items()))
    return Findings(
        title=title or outcome.name,
        sentence=f"{incomplete}{sentence}",
        value={"rows": rows, **value, "warnings": warnings, "result": outcome},
        passed=passed and outcome.is_complete,
        warnings=warnings,
        missing=outcome.undone,
        continuation="" if outcome.is_complete else outcome.how_to_go_on(Path()),
        left_out=outcome.left_out,
        spec=to_toml(outcome.experiment),
        command=outcome.line,
        source=f"{outcome.circumstances.words} {versions}. Every value is in {OUTCOME} beside this page.",
        **more,
    )


def verdict_findings(
    outcome: Outcome, *, passed: bool | None = None, sentence: str = "", **more: Any
) -> Findings:
    """Findings of cases that are held against others; the JSON is the outcome itself."""
    passed = outcome.passed if passed is None else passed
    found = findings_of(outcome, sentence=sentence or outcome.sentence(), passed=passed, **more)
    return replace(found, value=outcome)
