"""Ledgers beside the textbook: a table for each layout, as multiples of it; and every row of a ledger."""

from collections.abc import Sequence
from pathlib import Path

from compare.contract.communication import Communication
from compare.contract.record import read_record
from compare.judge.ledger import Flow
from compare.show.findings import NONE, Column, Findings, Row, Table, Text, table_of
from compare.studies.ledgers import EngineLedger, LedgerStudy
from compare.terminal import layout_in_words

BELOW = "Bytes of a device in a step, all calls together; an engine's cell is a multiple of the textbook's."
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


def layouts_of(ledgers: Sequence[EngineLedger]) -> list[list[EngineLedger]]:
    """Ledgers by layout, in order: those of one stand side by side, each engine once."""
    groups: dict[tuple[str, int], list[EngineLedger]] = {}
    for ledger in ledgers:
        words = layout_in_words(ledger.experiment, "cpu")
        copy = sum(
            ledger.engine == one.engine for (of, _), group in groups.items() if of == words for one in group
        )
        groups.setdefault((words, copy), []).append(ledger)
    return list(groups.values())


def table_of_layout(ledgers: Sequence[EngineLedger]) -> Table:
    """The flows of one layout: the textbook's bytes, and of each engine what it sends of them."""
    pp = ledgers[0].experiment.layout.pp
    flows: dict[tuple[str, str, int], dict[str, Flow]] = {}
    for ledger in ledgers:
        for flow in ledger.flows:
            flows.setdefault((flow.axis, flow.role, flow.stage), {})[ledger.engine] = flow
    rows = []
    for (axis, role, stage), by_engine in sorted(flows.items()):
        sizes = dict.fromkeys(
            f"{flow.textbook:,.0f}" if flow.textbook else NONE for flow in by_engine.values()
        )
        words = [role, *([str(stage)] if pp > 1 else []), " / ".join(sizes)]
        cells = (_cell(by_engine.get(ledger.engine)) for ledger in ledgers)
        rows.append(Row(Text(axis), [*map(Text, words), *cells]))
    columns = ["role", *(["stage"] if pp > 1 else [])]
    return Table(
        name=f"Beside the textbook: {layout_in_words(ledgers[0].experiment, 'cpu')}",
        corner="axis",
        columns=[*columns, "textbook", *(ledger.engine for ledger in ledgers)],
        rows=rows,
        words=len(columns),
        below=BELOW,
    )


def _cell(flow: Flow | None) -> Text:
    if flow is None or not (flow.sent or flow.textbook):
        return Text(NONE)
    return Text(f"{flow.sent:,}" if flow.ratio is None else f"{flow.ratio:.2f}")


def findings_of_ledgers(study: LedgerStudy, folder: Path, *, places: bool) -> Findings:
    """A table for each layout, what does not fit it, who has none, and a sentence; with `places` also every
    row of every ledger, with its place in the program.
    """
    tables = [*map(table_of_layout, layouts_of(study.ledgers))]
    for ledger in study.ledgers if places else ():
        rows = read_record(folder / ledger.case).ledger.rows
        tables.append(table_of(f"{ledger.case}: every place", PLACES, rows, look="words"))
    return Findings(
        title="The ledger",
        sentence=study.sentence(),
        value=study,
        passed=study.passed,
        tables=tables,
        notes=[f"records: {folder}"],
        missing={name: f"is MISSING: it {why}" for name, why in study.missing.items()},
        left_out=study.left_out,
        warnings=[f"{ledger.case}: {line}" for ledger in study.ledgers for line in ledger.unexpected],
    )
