"""Print findings on stdout, as tables and sentences or as one JSON object."""

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text as RichText

from compare.show.findings import Findings, Table, Text, by_reason
from compare.terminal import coloured, print_json, results_console

COLOURS = {"pass": "green", "fail": "red"}


def print_findings(findings: Findings, *, as_json: bool) -> None:
    """Print findings on stdout."""
    if as_json:
        print_json(findings.value)
        return
    console = results_console()
    for table in findings.tables:
        console.print(terminal_table(table))
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
        console.print(line, style="red", soft_wrap=True)
    style = "bold green" if findings.passed else "bold red"
    console.print(findings.sentence, style=style, soft_wrap=True)


def terminal_table(table: Table) -> RichTable:
    """A table as rich prints it."""
    drawn = RichTable(
        title=table.name, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    drawn.add_column(_header(table.corner), overflow="fold")
    for place, name in enumerate(table.columns):
        side = "left" if place < table.words else "right"
        drawn.add_column(_header(name), justify=side, no_wrap="ratio" in name, overflow="fold")
    for row in table.rows:
        drawn.add_row(cell_of(row.head), *map(cell_of, row.cells))
    return drawn


def _header(name: str) -> str:
    """A header with its unit on a second line, so that a table fits into 80 characters."""
    return name.replace(" (", "\n(")


def cell_of(cell: Text) -> str | RichText:
    """A cell as rich prints it. Good news is green, bad news red."""
    return coloured(cell.text, COLOURS[cell.news]) if cell.news else cell.text
