"""What a lesson's run sent: rows of its ledgers and instructions of XLA, tied to lines of the source."""

import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from compare.contract.communication import Communication, summed
from compare.contract.record import Record
from compare.judge.ledger_lines import Line
from compare.pipeline.instructions import Instruction
from compare.present.ledger_lines import Key, rows_of
from compare.present.lesson.sources import Source
from compare.studies.ledgers import EngineLedger

_PLACE = re.compile(r"^([\w./-]+\.py):(\d+)( \([^)]*\))?")
PLACES = 3
"""Of one cell; more are counted."""


class Cell(Struct, frozen=True, kw_only=True):
    """What one engine sent of a row."""

    anchor: str
    calls: int
    bytes: int
    line: Line | None = None
    """Beside the closed form; None for numbers that go alone, which that leaves out."""
    lines: tuple[int, ...] = ()
    """Of the engine's own file."""
    elsewhere: tuple[str, ...] = ()
    """Where else it comes from, in words, if no line of the file causes it."""


class Row(Struct, frozen=True, kw_only=True):
    """One kind of collective along one axis for one purpose, in all engines."""

    key: Key
    anchor: str
    stages: tuple[int, ...]
    """Ranks of the pipeline that are alike in it; () for numbers that go alone."""
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


def ledger_rows(
    sources: Sequence[Source], records: Mapping[str, Record], ledgers: Sequence[EngineLedger]
) -> list[Row]:
    """A row for each kind, axis and purpose that any engine sends or should send; of a pipeline by stages.

    Those with most bytes come first, and numbers that go alone last.

    Args:
        sources: of the lesson, in the order of the columns.
        records: by engine.
        ledgers: theirs, beside the closed form.
    """
    rows = []
    for found in rows_of(ledgers):
        anchor = anchor_of(found.key, found.stages)
        cells = {
            source.engine: _cell(
                found.key, anchor, source, records[source.engine], line=found.lines[source.engine]
            )
            for source in sources
            if source.engine in found.lines
        }
        rows.append(Row(key=found.key, anchor=anchor, stages=found.stages, cells=cells))
    rows.sort(
        key=lambda row: -max(max(cell.bytes, cell.line.expected) for cell in row.cells.values() if cell.line)
    )
    lined_up = {(engine, row.key) for row in rows for engine in row.cells}
    return rows + _other_rows(sources, records, lined_up)


def _other_rows(
    sources: Sequence[Source], records: Mapping[str, Record], lined_up: set[tuple[str, Key]]
) -> list[Row]:
    """What the closed form leaves out, numbers such as a loss: by kind, axis and purpose, of one stage."""
    cells: dict[Key, dict[str, Cell]] = {}
    for source in sources:
        record = records[source.engine]
        for one in summed(record.ledger.rows):
            key = one.kind, one.axis, one.purpose
            if (source.engine, key) in lined_up:
                continue
            cell = _cell(key, anchor_of(key, ()), source, record, total=one)
            cells.setdefault(key, {})[source.engine] = cell
    return [Row(key=key, anchor=anchor_of(key, ()), stages=(), cells=cells[key]) for key in sorted(cells)]


def anchor_of(key: Key, stages: Sequence[int]) -> str:
    """Anchor of a row."""
    words = (*key, *map(str, stages)) if stages else (*key, "alone")
    return "-".join(("row", *(re.sub(r"\W+", "-", word) for word in words if word)))


def _cell(
    key: Key,
    row: str,
    source: Source,
    record: Record,
    *,
    line: Line | None = None,
    total: Communication | None = None,
) -> Cell:
    """One engine's cell of a row with the anchor `row`, from its line or, without one, its total."""
    own = [row for row in record.ledger.rows if (row.kind, row.axis, row.purpose) == key]
    compiled = [one for one in record.instructions or () if (one.kind, one.axis, one.purpose) == key]
    lines = {mark.line for mark in source.marks if mark.causes(key[0], key[2])}
    lines |= {source.line_of(one) for one in compiled} - {0}
    places = [place for row in own if (place := _PLACE.match(row.source))]
    name = source.path.rpartition("/")[2]
    lines |= {int(place[2]) for place in places if place[1] == name and source.has(int(place[2]), place[3])}
    return Cell(
        anchor=f"{row}-{source.engine}",
        calls=line.calls if line else total.calls if total else 0,
        bytes=line.found if line else total.bytes if total else 0,
        line=line,
        lines=tuple(sorted(lines)) if own else (),
        elsewhere=() if lines else _counted(dict.fromkeys(place[0] for place in places)),
    )


def _counted(places: Iterable[str]) -> tuple[str, ...]:
    first, more = list(places)[:PLACES], list(places)[PLACES:]
    return (*first, f"{len(more)} more places") if more else tuple(first)


def compiled_steps(
    source: Source, instructions: Iterable[Instruction], rows: Iterable[Row]
) -> list[Compiled]:
    """The instructions of one engine, those with most bytes first."""
    cells: dict[Key, str] = {}
    for row in rows:
        if source.engine in row.cells:
            cells.setdefault(row.key, row.cells[source.engine].anchor)
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
