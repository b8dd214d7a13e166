"""What a study found, before anything is drawn: sentences, tables and figures as data.

A study makes one `Findings`; `show.terminal`, `show.page` and `show.markdown` each turn it into text, and
`Findings.value` is what --json prints.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, TypeVar

from markupsafe import Markup
from msgspec import Struct

from compare.judge.statistics import Estimate

NONE = "-"
Value = Estimate | float | str | None
R = TypeVar("R")


class Text(Struct, frozen=True, omit_defaults=True):
    """A cell: its text, a small note beside it, and whether it is good or bad news."""

    text: str
    note: str = ""
    news: str = ""
    """pass, fail, known (a difference that is explained), unexplained (one that was seen before) or ''."""


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
    groups: list[str] = []
    """Headers over as many columns each, where columns come in groups."""
    look: str = ""
    """`words` for text that is set to the left, `upright` for one that was turned; '' for numbers."""
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
        return Text(self.text(row), news=self.news(row) if self.news else "")

    def text(self, row: R) -> str:
        """The cell: `written` of the row's figure."""
        return written(self.of(row), self.form)


def written(value: Value, form: str | Callable[[Any], str] = "") -> str:
    """A figure as text: 1.2, or 1.2 [1.1, 1.3] of an estimate with an interval; `NONE` for none.

    Args:
        value: the figure.
        form: a format such as `.1f`, or what makes text of it.
    """
    if value is None:
        return NONE

    def say(number: Any) -> str:
        return format(number, form) if isinstance(form, str) else form(number)

    if not isinstance(value, Estimate):
        return say(value)
    return say(value.median) + (f" [{say(value.low)}, {say(value.high)}]" if value.has_interval else "")


def table_of(
    name: str,
    columns: Sequence[Column[R]],
    rows: Sequence[R],
    *,
    below: str = "",
    look: str = "",
    words: int = 0,
) -> Table:
    """A table of rows; the first column names them, and one without any figure is left out.

    Args:
        name: its title.
        columns: at least one.
        rows: what the columns read.
        below, look, words: as of `Table`.
    """
    head, *figures = columns
    cells = {column.name: [column.cell(row) for row in rows] for column in figures}
    kept = {name: own for name, own in cells.items() if any(cell.text != NONE for cell in own)}
    return Table(
        name=name,
        corner=head.name,
        columns=list(kept),
        rows=[
            Row(Text(head.text(row)), [own[place] for own in kept.values()]) for place, row in enumerate(rows)
        ],
        below=below,
        look=look,
        words=words,
    )


class Series(Struct, frozen=True, kw_only=True):
    """What has one name in a figure's legend; series of one name share its entry."""

    label: str
    x: Sequence[float]
    y: Sequence[float] = ()
    spread: Sequence[tuple[float, float]] = ()
    """Low and high end of each point's whisker, along the axis of the figures; none for no whiskers."""
    look: Literal["line", "points", "bars", "upright"] = "line"
    """upright: a vertical line through the figure at x[0]."""
    thick: float = 0.6
    """Of bars: of the room that a name has."""
    begin: Sequence[float] = ()
    """Of bars: where each begins; 0 by default."""
    texts: Sequence[str] = ()
    """Of bars: what stands behind each."""
    colour: int | Sequence[int] | None = None
    """Numbers of the palette's colours; the ink's for None."""
    dash: str = "-"
    mark: str = ""


class Picture(Struct, frozen=True):
    """A drawing with its heading and its caption."""

    title: str
    svg: Markup
    caption: str
    is_wide: bool = False
    """It takes the page's whole width."""


class Figure(Struct, frozen=True, kw_only=True):
    """A figure of two axes: y over x; or, where rows have `names`, x for each name, from above."""

    title: str
    caption: str
    x: str
    """What the axis is, with its unit."""
    y: str = ""
    series: Sequence[Series]
    names: Sequence[str] = ()
    log: Literal["", "x", "y", "xy"] = ""
    """Axes that are logarithmic."""
    ticks: dict[float, str] = {}
    """Names of values of x, where numbers would not be read."""
    y_form: str = ""
    """How values of a y that begins with 0 are written: {x:.0%}."""
    is_small: bool = False
    """Half as wide: it stands beside others."""
    at: float | None = None
    """A thin line that others are seen against: at this x where rows have names, else at this y."""

    @property
    def is_narrow(self) -> bool:
        """True if a page has room for another one beside it."""
        return self.is_small or bool(self.names)


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
    details: Sequence[Table] = ()
    """How it was run: tables for the page alone, folded."""
    figures: Sequence[Figure] = ()
    drawn: Callable[[], list[Picture]] = list
    """Pictures of another kind, for the page alone."""
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
    """That makes it again; '' if none is known."""
    source: str = ""
    """Version of shardpair, and the files that have every single figure."""
