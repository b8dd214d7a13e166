"""Names for the rows of a test's table."""

import re


def short(row: object) -> str:
    """The first words of a row, or of its first field, as one word that pytest's -k can select."""
    first = row[0] if isinstance(row, tuple) else row
    return re.sub(r"\W+", "_", str(first)).strip("_")[:32] or "nothing"
