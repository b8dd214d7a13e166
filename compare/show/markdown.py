"""Findings as Markdown, for a page of docs."""

from collections.abc import Iterable, Sequence

from compare.show.findings import Findings, Table, Text


def markdown(findings: Findings) -> str:
    """The tables of findings, the sentences that they need, and the outcome."""
    tables = [part for table in findings.tables for part in (markdown_table(table), table.below)]
    said = [findings.sentence, *findings.about, *(f"**{line}**" for line in findings.warnings)]
    return "\n\n".join(filter(None, [*tables, *said]))


def markdown_table(table: Table) -> str:
    """A table under its title, in bold."""
    return f"**{table.name}**\n\n{markdown_of(table)}"


def markdown_of(table: Table) -> str:
    """A table without its title; bad news in bold."""
    words = len(table.columns) if table.look == "words" else table.words
    cells = ([row.head.text, *map(_text, row.cells)] for row in table.rows)
    return markdown_rows([table.corner, *table.columns], cells, numbers_from=1 + words)


def _text(cell: Text) -> str:
    text = f"{cell.text} {cell.note}".strip()
    return f"**{text}**" if cell.news == "fail" else text


def markdown_rows(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers_from: int = 1) -> str:
    """A Markdown table; columns from `numbers_from` on stand to the right."""
    align = ["---" if column < numbers_from else "---:" for column in range(len(header))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, align, *rows))
