"""A table as Markdown."""

from collections.abc import Iterable, Sequence


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers_from: int = 1) -> str:
    """A Markdown table; columns from `numbers_from` on stand to the right."""
    align = ["---" if column < numbers_from else "---:" for column in range(len(header))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, align, *rows))
