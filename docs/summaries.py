"""Short tables on top of the pages whose full tables are in docs/generated/: each counts what is there."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from compare.show.markdown import markdown_rows as markdown

GENERATED = Path(__file__).parent / "generated"
LEDGER, PARITY = GENERATED / "ledger.md", GENERATED / "parity.md"
EQUAL, PATTERN, UNEXPLAINED = "equal to the closed form", "off by a known pattern", "unexplained"
AT_REST = "What a device holds"
"""Section of the parity page."""


def tables_of(page: Path) -> Iterator[tuple[str, list[list[str]]]]:
    """Every section with a table: its title, and the table's cells, header first."""
    for section in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, *lines = section.splitlines()
        cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
        if cells:
            yield title, [cells[0], *cells[2:]]


def ledger() -> str:
    """Of every engine: its lines in the ledger that equal the closed form, and those that do not."""
    counts: dict[str, Counter[str]] = {}
    for title, (header, *rows) in tables_of(LEDGER):
        pipeline = re.search(r"[Pp]ipeline of (\d+)", title)
        first = header.index("closed form") + 1
        for engine in header[first:]:
            counts.setdefault(engine, Counter())["layouts"] += 1
        for row in rows:
            stages = row[3] if pipeline else ""
            times = int(pipeline[1]) if pipeline and stages == "all" else 1 + stages.count(",")
            for engine, cell in zip(header[first:], row[first:], strict=True):
                counts[engine][state_of(cell)] += times
    columns = ("layouts", EQUAL, PATTERN, UNEXPLAINED)
    rows = ([f"`{engine}`", *(str(found[column]) for column in columns)] for engine, found in counts.items())
    return markdown(["engine", *columns], rows)


def state_of(cell: str) -> str:
    """One cell of the ledger in words; an engine without this line: "-"."""
    if cell in ("=", "–"):  # noqa: RUF001
        return EQUAL if cell == "=" else "-"
    return UNEXPLAINED if ": unexplained (" in cell or cell.startswith("**") else PATTERN


def parity_count() -> str:
    """Number of cells of the matrix that pass: `86 of 86`."""
    found = re.search(r"^(\d+ of \d+) cells pass", PARITY.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"{PARITY} does not say how many cells pass"
    return found[1]


def parity() -> str:
    """The worst errors of every engine over all its layouts."""
    found: list[list[str]] = []
    engines: list[str] = []
    for title, (header, *rows) in tables_of(PARITY):
        engines, columns = header[2:], list(zip(*rows, strict=True))[2:]
        if title == AT_REST:
            off = [re.findall(r"\(([+-][\d.]+)%\)", " ".join(column)) for column in columns]
            worst_off = (max(abs(float(percent)) for percent in of) for of in off)
            found.append(["bytes at rest, off their closed form", *(f"{percent} %" for percent in worst_off)])
            continue
        errors = [re.findall(r"(\S+e-\d+) / (\S+e-\d+)", " ".join(column)) for column in columns]
        if not found:
            found.append(["layouts", *(str(len(of)) for of in errors)])
        for index, what in enumerate(("gradients", "weights after 20 steps")):
            worst_error = (max(float(pair[index]) for pair in of) for of in errors)
            found.append([f"{title}, {what}", *(f"{error:.0e}" for error in worst_error)])
    return markdown(["worst error over all its layouts", *(f"`{name}`" for name in engines)], found)
