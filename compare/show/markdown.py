"""Findings as Markdown, for a page of docs."""

from collections.abc import Iterable, Sequence

from compare.show.findings import Findings, Table, Text, by_reason


def markdown(findings: Findings) -> str:
    """The tables of findings, the sentences that they need, and the outcome."""
    tables = [part for table in findings.tables for part in (markdown_table(table), table.below)]
    words = [findings.sentence, *findings.about, *findings.notes]
    words += [f"**{line}**" for line in findings.warnings]
    words += [f"**{name}**: {why}" for name, why in findings.missing.items()]
    words += [f"{', '.join(names)}: {why}" for why, names in by_reason(findings.left_out).items()]
    return "\n\n".join(filter(None, [*tables, *words]))


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
