"""Print findings on stdout, as tables and sentences or as one JSON object."""

import re

from msgspec.structs import replace
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Table as RichTable

from compare.show.findings import Findings, Row, Table, Text, by_reason
from compare.terminal import coloured, errors_console, print_json, printable, results_console

COLOURS = {"pass": "green", "fail": "red"}
GAP = 2
"""Characters between two columns."""
SPACE = re.compile(r"(?<= )(?!(?:[kMGTP]?B|min|m?s|h)\b)(?![^\[\]]*\])")
"""A space that may end a line: not before a unit, and not within an interval."""
HYPHEN = re.compile(r"(?<=\w[-_+])(?=[A-Za-z])")
"""A place within a word where a line may end, if the word has no room."""


def print_findings(findings: Findings, *, as_json: bool) -> None:
    """Print findings on stdout, and warnings on stderr unless they explain a failure."""
    if as_json:
        print_json(findings.envelope)
        return
    console = results_console()
    for table in findings.tables:
        print_table(table)
        if table.below:
            console.print(table.below, soft_wrap=True)
    for line in findings.about if findings.tables else ():
        console.print(line, soft_wrap=True)
    for line in findings.notes:
        console.print(line, soft_wrap=True)
    for why, names in by_reason(findings.left_out).items():
        console.print(f"left out: {', '.join(names)}: {why}", style="yellow", soft_wrap=True)
    for name, why in findings.missing.items():
        console.print(f"{name} {why}", style="red", soft_wrap=True)
    for line in findings.warnings:
        to = errors_console() if findings.passed else console  # reasons of a failure are part of the result
        to.print(line, style="red", soft_wrap=True)
    style = "bold red" if not findings.passed else "bold yellow" if findings.is_doubtful else "bold green"
    console.print(findings.sentence, style=style, soft_wrap=True)


def print_table(table: Table) -> None:
    """Print a table on stdout.

    In a narrow terminal lines are broken, or rows and columns exchanged, or the columns split into blocks.
    """
    console = results_console()
    for blocks in (
        [table],
        [_turned(table)],
        *(_split(table, count) for count in range(2, len(table.columns))),
    ):
        if all(drawn := [_drawn(block, console.width) for block in blocks]):
            console.print(*drawn)
            return
    console.print(table.name, style="italic")
    for row in table.rows:
        line = coloured(row.head.text, _style(row.head))
        for name, cell in zip(table.columns, row.cells, strict=True):
            line.append(f"; {name} ").append_text(coloured(cell.text, _style(cell)))
        console.print(line)


def _drawn(table: Table, width: int) -> RichTable | None:
    """The table as rich prints it in `width` characters; None if it does not fit."""
    heads = [name.replace(" (", "\n(") for name in (table.corner, *table.columns)]  # units on a second line
    lines = [[row.head, *row.cells] for row in table.rows]
    columns = [[head, *(line[place].text for line in lines)] for place, head in enumerate(heads)]
    widths = [max(map(_width, column)) for column in columns]
    least = [max(_width(broken(text, 0)) for text in column) for column in columns]
    room = width - GAP * len(columns)
    if sum(least) > room:
        return None
    while sum(widths) > room:
        widest = max(range(len(widths)), key=lambda place: (widths[place] > least[place], widths[place]))
        widths[widest] -= 1
    title = table.name or None
    drawn = RichTable(
        title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for place, (head, most) in enumerate(zip(heads, widths, strict=True)):
        drawn.add_column(
            broken(head, most), justify="left" if place <= table.words else "right", no_wrap=True
        )
    for line in lines:
        texts = (broken(cell.text, most) for cell, most in zip(line, widths, strict=True))
        drawn.add_row(*(coloured(text, _style(cell)) for text, cell in zip(texts, line, strict=True)))
    return drawn


def _turned(table: Table) -> Table:
    """The table with a row for each column."""
    rows = [
        Row(Text(name), [row.cells[place] for row in table.rows]) for place, name in enumerate(table.columns)
    ]
    return replace(table, columns=[row.head.text for row in table.rows], rows=rows, words=0)


def _split(table: Table, count: int) -> list[Table]:
    """Tables of the same rows with a part of the columns each."""
    size = -(-len(table.columns) // count)
    return [
        replace(
            table,
            name=table.name * (not start),
            columns=table.columns[start : start + size],
            rows=[replace(row, cells=row.cells[start : start + size]) for row in table.rows],
            words=max(table.words - start, 0),
        )
        for start in range(0, len(table.columns), size)
    ]


def broken(text: str, width: int) -> str:
    """A text with line breaks after spaces, - and _, in lines of `width` characters if possible."""
    lines: list[str] = []
    for line in text.split("\n"):
        lines.append("")
        words = SPACE.split(line)
        for piece in (
            of for word in words for of in (HYPHEN.split(word) if _width(word) > width else [word])
        ):
            if lines[-1] and cell_len(lines[-1] + piece.rstrip()) > width:
                lines.append("")
            lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def _width(text: str) -> int:
    """The width of the longest line as it is printed."""
    return max(map(cell_len, printable(text, keep="\n").split("\n")))


def _style(cell: Text) -> str:
    """Good news is green, bad news red."""
    return COLOURS.get(cell.news, "")
