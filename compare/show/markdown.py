"""Findings as Markdown, for a page of docs."""

from compare.show.findings import Findings, Table, by_reason


def markdown(findings: Findings) -> str:
    """The tables and sentences of findings."""
    tables = [part for table in findings.tables for part in (_table(table), table.below)]
    words = [findings.sentence, *findings.about, *findings.notes]
    words += [f"**{line}**" for line in findings.warnings]
    words += [f"**{name}**: {why}" for name, why in findings.missing.items()]
    words += [f"{', '.join(names)}: {why}" for why, names in by_reason(findings.left_out).items()]
    return "\n\n".join(filter(None, [*tables, *words]))


def _table(table: Table) -> str:
    """A table under its title. Bad news is bold, numbers are right-aligned."""
    align = ["---" if column <= table.words else "---:" for column in range(1 + len(table.columns))]
    cells = (
        [row.head.text, *(f"**{cell.text}**" if cell.news == "fail" else cell.text for cell in row.cells)]
        for row in table.rows
    )
    lines = [f"| {' | '.join(row)} |" for row in ([table.corner, *table.columns], align, *cells)]
    return "\n".join([f"**{table.name}**\n", *lines])
