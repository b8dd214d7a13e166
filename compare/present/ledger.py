"""Ledgers beside their closed forms, a table for each layout, unmatched lines first; a Markdown page."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from compare.contract.communication import Communication
from compare.contract.record import read_record
from compare.judge.known_deviations import PATTERNS
from compare.judge.ledger_lines import ORDER, Line
from compare.show.findings import NONE, Column, Findings, Row, Table, Text, table_of
from compare.spec.engines.registry import ENGINES
from compare.studies.ledgers import EngineLedger, LedgerStudy
from compare.terminal import layout_in_words

AS_EXPECTED = "="
PLACES = (
    Column[Communication]("operation", lambda row: row.kind),
    Column[Communication]("axis", lambda row: row.axis),
    Column[Communication]("for", lambda row: row.purpose),
    Column[Communication]("stage", lambda row: str(row.stage)),
    Column[Communication]("phase", lambda row: row.phase),
    Column[Communication]("ranks", lambda row: str(row.group_size)),
    Column[Communication]("dtype", lambda row: row.dtype),
    Column[Communication]("calls", lambda row: row.calls, ",d"),
    Column[Communication]("turns", lambda row: " x ".join(map(str, row.loops))),
    Column[Communication]("bytes", lambda row: row.bytes, ",d"),
    Column[Communication]("from", lambda row: row.source),
)

Key = tuple[str, str, str]


class LedgerRow(Struct, frozen=True, kw_only=True):
    """One line of all engines under one layout."""

    key: Key
    """Operation, axis, purpose."""
    stages: tuple[int, ...]
    """Ranks of the pipeline that are alike in it."""
    lines: dict[str, Line]
    """By engine; those that neither expect nor send anything are missing."""

    @property
    def rank(self) -> tuple:
        """New differences come first, then those that nothing explains."""
        states = [ORDER.index(line.state) for line in self.lines.values()]
        lines = self.lines.values()
        known = not any(line.is_new for line in lines), all(line.is_explained for line in lines)
        return *known, min(states), self.stages, self.key


def layouts_of(ledgers: Sequence[EngineLedger]) -> list[list[EngineLedger]]:
    """Ledgers by layout, in order: those of one stand side by side, each engine once."""
    groups: dict[tuple[str, int], list[EngineLedger]] = {}
    times: Counter[tuple[str, str]] = Counter()
    for ledger in ledgers:
        words = layout_in_words(ledger.experiment, "cpu")
        groups.setdefault((words, times[words, ledger.engine]), []).append(ledger)
        times[words, ledger.engine] += 1
    return list(groups.values())


def rows_of(ledgers: Sequence[EngineLedger]) -> list[LedgerRow]:
    """The lines of one layout's engines side by side."""
    found: dict[tuple[Key, int], dict[str, Line]] = {}
    for ledger in ledgers:
        for line in ledger.lines:
            at = (line.kind, line.axis, line.purpose), line.stage
            found.setdefault(at, {})[ledger.engine] = msgspec.structs.replace(line, stage=0)
    alike: dict[tuple[Key, tuple], list[int]] = {}
    for (key, stage), lines in found.items():
        alike.setdefault((key, tuple(sorted(lines.items(), key=lambda item: item[0]))), []).append(stage)
    rows = [
        LedgerRow(key=key, stages=tuple(sorted(stages)), lines=dict(lines))
        for (key, lines), stages in alike.items()
    ]
    return sorted(rows, key=lambda row: row.rank)


def findings_of_ledgers(found: LedgerStudy, folder: Path, *, places: bool) -> Findings:
    """A table for each layout, what explains its lines, who has none, and a sentence.

    Args:
        found: the ledgers of a run.
        folder: of its records.
        places: also a table of every row of every ledger, with its place in the program.
    """
    every = found.ledgers if places else ()
    return Findings(
        title="The ledger",
        sentence=found.sentence(),
        value=found,
        passed=found.passed,
        tables=[
            *map(table_of_layout, layouts_of(found.ledgers)),
            *(
                table_of(
                    f"{ledger.case}: every place",
                    PLACES,
                    read_record(folder / ledger.case).ledger.rows,
                    look="words",
                )
                for ledger in every
            ),
        ],
        notes=[*patterns_of(found.ledgers), f"records: {folder}"],
        missing={name: f"is MISSING: {why}" for name, why in found.missing.items()},
        left_out=found.left_out,
        warnings=[line for ledger in found.ledgers for line in _incomplete(ledger)],
    )


def patterns_of(ledgers: Iterable[EngineLedger]) -> list[str]:
    """The patterns that explain some line, and how, in the order in which they are known."""
    names = {name for ledger in ledgers for line in ledger.lines for name in line.why.split(", ")}
    return [f"{name}: {why}" for name, why in PATTERNS.items() if name in names]


def table_of_layout(ledgers: Sequence[EngineLedger]) -> Table:
    """The lines of one layout: a column for the closed form, and one for each engine."""
    pp, engines = ledgers[0].experiment.layout.pp, [ledger.engine for ledger in ledgers]
    columns = ["axis", "for", *(["stage"] if pp > 1 else [])]
    rows = []
    for row in rows_of(ledgers):
        kind, *words = row.key
        if pp > 1:
            words.append("all" if len(row.stages) == pp else ", ".join(map(str, row.stages)))
        cells = (_cell(row.lines.get(engine)) for engine in engines)
        rows.append(Row(Text(kind), [*map(Text, (*words, _closed_form(row))), *cells]))
    return Table(
        name=layout_in_words(ledgers[0].experiment, "cpu"),
        corner="operation",
        columns=[*columns, "closed form", *engines],
        rows=rows,
        words=len(columns),
    )


def _closed_form(row: LedgerRow) -> str:
    """Bytes of the closed form; JAX's / PyTorch's where they differ."""
    by_side = {ENGINES[engine].side: line.expected for engine, line in sorted(row.lines.items())}
    return " / ".join(dict.fromkeys(f"{size:,.0f}" if size else NONE for size in by_side.values()))


def _cell(line: Line | None) -> Text:
    """What one engine sent, and what explains it."""
    if line is None:
        return Text(NONE, news="pass")
    words, news = line_words(line)
    if line.state == "expected":
        return Text(AS_EXPECTED, news=news)
    return Text(f"{line.found:,}" if line.found else "nothing", words, news)


def line_words(line: Line) -> tuple[str, str]:
    """How a line stands to its closed form, in words; and whether that is good news."""
    if line.state == "expected":
        return AS_EXPECTED, "pass"
    if line.why:
        return line.why, "known"
    seen = f"unexplained ({line.seen or 'not seen before'})"
    form = f"closed form: {line.expected:,.0f} B" if line.expected else "closed form: nothing"
    return f"{seen}, {form}", "fail" if line.is_new else "unexplained"


def _incomplete(ledger: EngineLedger) -> list[str]:
    return [f"{ledger.engine} is incomplete: {problem}" for problem in ledger.problems]
