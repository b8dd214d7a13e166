"""Ledgers of engines lined up with the textbook: a table for each layout, and every row of a ledger."""

from collections.abc import Collection, Sequence
from pathlib import Path

from msgspec import Struct

from compare.contract.communication import Communication
from compare.contract.record import Record
from compare.judge.ledger import Flow, line_up, recorded_rows, snapshot_rows, unlike_textbook
from compare.judge.outcome import read_run
from compare.judge.strategy import asked_of
from compare.show.findings import NONE, Column, Findings, Row, Table, Text, table_of
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import Experiment
from compare.terminal import layout_in_words

PEER = "a peer has ways of its own: there is no closed form of what it sends"
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


class EngineLedger(Struct, frozen=True, kw_only=True):
    """What one engine communicates under one layout, beside the textbook."""

    case: str
    engine: str
    experiment: Experiment
    platform: str
    flows: list[Flow] = []
    is_recorded: bool = False
    """Whether the snapshot has this engine, layout and version: then it is held to those bytes."""
    unexpected: list[str] = []
    """What could not be read, is not the layout's, or is not what was recorded."""


def engine_ledger(case: str, record: Record) -> EngineLedger:
    """One record's ledger beside textbook and snapshot; of a peer nothing, which has ways of its own."""
    manifest, rows = record.manifest, record.ledger.rows
    engine, experiment, platform = manifest.engine, manifest.experiment, manifest.platform
    if engine not in STUDIED:
        return EngineLedger(case=case, engine=engine, experiment=experiment, platform=platform)
    recorded = recorded_rows(engine, asked_of(record), manifest.versions)
    flows = line_up(engine, experiment, rows)
    unexpected = [f"incomplete: {problem}" for problem in record.ledger.problems]
    is_compiled = record.work is not None and bool(record.work.compiled)
    unexpected += unlike_textbook(engine, experiment, rows, is_compiled=is_compiled)
    if recorded and (sent := snapshot_rows(rows)) != recorded:
        odd = [f"sent {row}" for row in sent if row not in recorded]
        odd += [f"recorded {row}" for row in recorded if row not in sent]
        unexpected.append(f"not as recorded: {', '.join(odd)}")
    return EngineLedger(
        case=case,
        engine=engine,
        experiment=experiment,
        platform=platform,
        flows=flows,
        is_recorded=bool(recorded),
        unexpected=unexpected,
    )


def layouts_of(ledgers: Sequence[EngineLedger]) -> list[list[EngineLedger]]:
    """Ledgers by layout, in order: those of one stand side by side, each engine once."""
    groups: dict[tuple[str, int], list[EngineLedger]] = {}
    for ledger in ledgers:
        words = layout_in_words(ledger.experiment, ledger.platform)
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
        name=f"Beside the textbook: {layout_in_words(ledgers[0].experiment, ledgers[0].platform)}",
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


def findings_of_ledgers(folder: Path, *, places: bool) -> Findings:
    """Of a run: a table for each layout, what does not fit it, who has no ledger, and a sentence; with
    `places` also every row of every ledger, with its place in the program. Raises RecordError.
    """
    outcome, records = read_run(folder)
    peers = {name: PEER for name, record in records.items() if record.manifest.engine not in STUDIED}
    ledgers = [engine_ledger(name, record) for name, record in records.items() if name not in peers]
    tables = [*map(table_of_layout, layouts_of(ledgers))]
    for ledger in ledgers if places else ():
        rows = records[ledger.case].ledger.rows
        tables.append(table_of(f"{ledger.case}: every place", PLACES, rows, look="words"))
    missing, left_out = outcome.undone, outcome.left_out | peers
    return Findings(
        title="The ledger",
        sentence=sentence(ledgers, missing),
        value={"ledgers": ledgers, "missing": missing, "left_out": left_out},
        passed=not missing and not any(ledger.unexpected for ledger in ledgers),
        tables=tables,
        notes=[f"records: {folder}"],
        missing={name: f"is MISSING: it {why}" for name, why in missing.items()},
        left_out=left_out,
        warnings=[f"{ledger.case}: {line}" for ledger in ledgers for line in ledger.unexpected],
    )


def sentence(ledgers: Sequence[EngineLedger], missing: Collection[str]) -> str:
    """How far from the textbook the cases are, and how many are as they were recorded."""
    ratios = [flow.ratio for ledger in ledgers for flow in ledger.flows if flow.ratio is not None]
    exact = sum(flow.sent == flow.textbook for ledger in ledgers for flow in ledger.flows)
    far = f", the others {min(ratios):.2f} to {max(ratios):.2f} times" if exact < len(ratios) else ""
    recorded = sum(ledger.is_recorded for ledger in ledgers)
    unexpected = ", ".join(ledger.case for ledger in ledgers if ledger.unexpected)
    parts = {
        f"{len(ledgers)} case{'s' * (len(ledgers) != 1)}": True,
        f"{exact} of {len(ratios)} flows are the textbook's to the byte{far}": ratios,
        f"{recorded} are held to recorded bytes": recorded,
        f"UNEXPECTED: {unexpected}": unexpected,
        f"MISSING: {', '.join(missing)}": missing,
    }
    return "; ".join(part for part, is_said in parts.items() if is_said)
