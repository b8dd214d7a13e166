"""The tables of a run: what each case cost, how far off it is, what it sent, how it was run."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from compare.contract.communication import summed
from compare.contract.record import Manifest, Record
from compare.judge.ladder import RungResult, Verdict, rungs_of
from compare.judge.metrics import METRICS
from compare.judge.outcome import Outcome
from compare.show.findings import NONE, Row, Table, Text, written
from compare.spec.engines.registry import ENGINES
from compare.terminal import error_text, human_bytes, layout_in_words

TRAFFIC = ("comm_bytes", "comm_calls", "comm_wire_bytes")
REMOVED = "tensors were removed after they had passed: their rungs are those judged then"


def cost_table(outcome: Outcome) -> Table:
    """Every case's figures, with the ratios of those that can be compared to the first case's."""
    rows = []
    for metric in METRICS:
        values = [figures.get(metric.key) or None for figures in outcome.figures.values()]
        if any(value is not None for value in values):
            of = values[0] if metric.has_ratio else None
            notes = ["", *(f"×{value / of:.2f}" if value and of else "" for value in values[1:])]  # noqa: RUF001
            texts = [written(value, metric.form) for value in values]
            rows.append(Row(Text(metric.label), [*map(Text, texts, notes)]))
    return Table(
        name=f"Costs ({outcome.platform.upper()} timings, one process each, not interleaved)",
        corner="per engine",
        columns=outcome.finished,
        rows=rows,
        below=f"× is how many times that of {outcome.finished[0]}. GFLOP/s are the model's, forward and "  # noqa: RUF001
        f"backward, without what is computed anew; MFU is their share of the vendor's peak.",
    )


def without_notes(table: Table) -> Table:
    """A table as a terminal has room for it."""
    rows = [replace(row, cells=[replace(cell, note="") for cell in row.cells]) for row in table.rows]
    return replace(table, rows=[replace(row, head=replace(row.head, note="")) for row in rows], below="")


def ladder_table(verdicts: Sequence[Verdict]) -> Table:
    """Every case's error on every rung, with the worst tensor or step, and the tolerance."""
    rows = []
    for rung in rungs_of(verdicts):
        results = [_result(verdict, rung) for verdict in verdicts]
        limit = next((_tolerance(result) for result in results if result), "")
        cells = []
        for verdict, result in zip(verdicts, results, strict=True):
            note = verdict.skipped.get(rung, "") if not result else result.worst if result.error else ""
            cells.append(replace(rung_text(verdict, rung), note=note))
        rows.append(Row(Text(rung, limit), cells))
    references = ", ".join(dict.fromkeys(verdict.reference for verdict in verdicts))
    return Table(
        name=f"The ladder: relative errors against {references}",
        corner="rung",
        columns=[verdict.candidate for verdict in verdicts],
        rows=rows,
        below="Relative to the largest entry of each tensor; the worst tensor or step is named. The first "
        "rung that fails is the verdict.",
    )


def rung_text(verdict: Verdict, rung: str) -> Text:
    """One rung's error as a cell: bad news if it is too large, - if the rung was not compared."""
    result = _result(verdict, rung)
    if result is None:
        return Text(NONE)
    return Text(error_text(result.error), news="" if result.passed else "fail")


def _result(verdict: Verdict, rung: str) -> RungResult | None:
    return next((result for result in verdict.rungs if result.rung == rung), None)


def _tolerance(result: RungResult) -> str:
    return f"at most {result.tolerance:.0e}" if result.tolerance else "exact"


def ledger_table(records: Mapping[str, Record], outcome: Outcome) -> Table:
    """What a device of each case sends in a steady step, by collective, axis and purpose."""
    sent = {
        name: {(row.axis, row.kind, row.purpose): row for row in summed(record.ledger.rows)}
        for name, record in records.items()
    }
    rows = []
    for axis, kind, purpose in sorted({key for by_key in sent.values() for key in by_key}):
        flows = [by_key.get((axis, kind, purpose)) for by_key in sent.values()]
        cells = [_sent(flow.bytes, flow.calls, flow.wire_bytes) if flow else Text(NONE) for flow in flows]
        rows.append(Row(Text(f"{kind} over {axis}", purpose), cells))
    total = [_sent(*(figures.get(key, 0) for key in TRAFFIC)) for figures in outcome.figures.values()]
    return Table(
        name="Communication of one step",
        corner="per device",
        columns=list(records),
        rows=[*rows, Row(Text("all"), total, is_total=True)],
        below="Logical bytes are the sizes of the full tensors; wire bytes are what a device sends, if "
        "collectives go round a ring.",
    )


def _sent(size: int, calls: int, wire: int) -> Text:
    return Text(human_bytes(size), f"{calls:,} call{'s' * (calls > 1)}, wire {human_bytes(wire)}")


def manifest_table(name: str, record: Record) -> Table:
    """Circumstances of one case: what its manifest says in words and numbers."""
    manifest = record.manifest
    facts = {field: getattr(manifest, field) for field in Manifest.__struct_fields__}
    facts |= {"layout": layout_in_words(manifest.experiment, manifest.platform)}
    facts |= {"versions": ", ".join(f"{package} {number}" for package, number in manifest.versions.items())}
    facts |= {"peak_memory_bytes": ", ".join(map(human_bytes, manifest.peak_memory_bytes))}
    return Table(
        name=f"How {name} was run: {ENGINES[manifest.engine].decides}",
        corner="fact",
        columns=["value"],
        rows=[
            Row(Text(field.replace("_", " ")), [Text(str(value))])
            for field, value in facts.items()
            if value and isinstance(value, str | int)
        ],
        look="words",
    )
