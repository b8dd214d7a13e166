"""What a lesson's run sent: rows of its ledgers and instructions of XLA, tied to lines of the source."""

import re
from collections.abc import Iterable, Mapping

from msgspec import Struct

from compare.contract.communication import Communication
from compare.contract.instructions import Instruction
from compare.contract.record import Record
from compare.present.lesson.sources import Source

Key = tuple[str, str, str]
"""(kind, axis, purpose)"""
_SOURCE = re.compile(r"^([\w./-]+\.py):(\d+)")


class Cell(Struct, frozen=True, kw_only=True):
    """What one engine sent of a row; nothing at all if calls is 0."""

    anchor: str
    calls: int = 0
    bytes: int = 0
    lines: tuple[int, ...] = ()
    """Of the engine's own file."""
    elsewhere: tuple[str, ...] = ()
    """Where else it comes from, in words, if no line of the file causes it."""


class Row(Struct, frozen=True, kw_only=True):
    """One kind of collective along one axis for one purpose, in all engines."""

    kind: str
    axis: str
    purpose: str
    anchor: str
    cells: dict[str, Cell]
    """By engine."""


class Compiled(Struct, frozen=True, kw_only=True):
    """One collective instruction of a compiled step, and the line that caused it."""

    number: int
    anchor: str
    instruction: Instruction
    line: int
    """Of the lesson's file; 0 if it comes from another one."""
    cell: str
    """Anchor of the ledger's cell that counts it; "" if there is none."""
    where: str
    """The innermost line of the side, in words."""


def ledger_rows(sources: Iterable[Source], records: Mapping[str, Record]) -> list[Row]:
    """A row for each kind, axis and purpose that any engine sent, most bytes first.

    Args:
        sources: of the lesson, in the order of the columns.
        records: by engine.
    """
    cells: dict[Key, dict[str, Cell]] = {}
    for source in sources:
        record = records[source.engine]
        for key in dict.fromkeys((one.kind, one.axis, one.purpose) for one in record.ledger):
            own = [one for one in record.ledger if (one.kind, one.axis, one.purpose) == key]
            cells.setdefault(key, {})[source.engine] = _cell(key, own, source, record.instructions or [])
    order = sorted(cells, key=lambda key: (-max(cell.bytes for cell in cells[key].values()), key))
    return [
        Row(kind=key[0], axis=key[1], purpose=key[2], anchor=anchor_of(key), cells=cells[key])
        for key in order
    ]


def anchor_of(key: Key, engine: str = "") -> str:
    """Anchor of a row, or of an engine's cell in it."""
    words = ("row", *(part.replace(" ", "-").replace("+", "-") for part in key), engine)
    return "-".join(filter(None, words))


def _cell(key: Key, own: list[Communication], source: Source, instructions: list[Instruction]) -> Cell:
    kind, _, purpose = key
    compiled = [one for one in instructions if (one.kind, one.axis, one.purpose) == key]
    lines = {mark.line for mark in source.marks if mark.causes(kind, purpose)}
    lines |= {source.line_of(one) for one in compiled} - {0}
    places = [place for place in map(_place, own) if place]
    lines |= {line for file, line in places if source.path.endswith(f"/{file}")}
    elsewhere = [str(one.stack[0]) for one in compiled if one.stack]
    elsewhere += [one.source for one in own if one.source]
    return Cell(
        anchor=anchor_of(key, source.engine),
        calls=sum(one.calls for one in own),
        bytes=sum(one.bytes for one in own),
        lines=tuple(sorted(lines)),
        elsewhere=() if lines else tuple(dict.fromkeys(elsewhere)),
    )


def _place(one: Communication) -> tuple[str, int] | None:
    """File and line that a row of the ledger names."""
    found = _SOURCE.match(one.source)
    return (found[1], int(found[2])) if found else None


def compiled_steps(
    source: Source, instructions: Iterable[Instruction], rows: Iterable[Row]
) -> list[Compiled]:
    """The instructions of one engine, those with most bytes first."""
    cells = {
        (row.kind, row.axis, row.purpose): row.cells[source.engine].anchor
        for row in rows
        if source.engine in row.cells
    }
    ordered = sorted(instructions, key=lambda one: (-one.bytes, one.kind, one.op_name, one.result))
    return [
        Compiled(
            number=number,
            anchor=f"{source.engine}-hlo-{number}",
            instruction=one,
            line=source.line_of(one),
            cell=cells.get((one.kind, one.axis, one.purpose), ""),
            where=f"{one.stack[0].file}:{one.stack[0].line}" if one.stack else "XLA does not say",
        )
        for number, one in enumerate(ordered, start=1)
    ]
