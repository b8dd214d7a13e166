"""Communication of the cases in a step, side by side, and how it stands to the closed form."""

from collections.abc import Sequence

from compare.contract.communication import Communication
from compare.judge.costs import Cost
from compare.judge.known_deviations import PATTERNS
from compare.judge.ledger_lines import Line
from compare.present.ledger_lines import unexplained, used
from compare.present.report.tables import NONE, Row, Table, Text
from compare.studies.ledgers import EngineLedger
from compare.terminal import human_bytes


def ledger_table(
    names: list[str],
    ledgers: list[list[Communication]],
    costs: list[Cost],
    beside: Sequence[EngineLedger] = (),
) -> Table:
    """Communication of each case in a step: a row for each collective, axis and purpose.

    Args:
        names: of the cases.
        ledgers: one for each, summed.
        costs: one for each: their totals.
        beside: one for each, beside its closed form; without them nothing is said of that.
    """
    items = [{(one.axis, one.kind, one.purpose): one for one in ledger} for ledger in ledgers]
    lines = [_worst(ledger) for ledger in beside] or [{} for _ in ledgers]
    rows = []
    for key in sorted({key for ledger in (*items, *lines) for key in ledger}):
        axis, kind, purpose = key
        found = zip(items, lines, strict=True)
        cells = [text for ledger, of in found for text in _traffic(ledger.get(key), of.get(key))]
        rows.append(Row(Text(f"{kind} over {axis}", purpose), cells))
    totals = [
        text for cost in costs for text in _figures(cost.comm_calls, cost.comm_bytes, cost.comm_wire_bytes)
    ]
    rows.append(Row(Text("all"), totals, is_total=True))
    columns = ["calls", "logical", "wire"] * len(names)
    return Table(name="Communication", corner="per device and step", columns=columns, rows=rows, groups=names)


def ledger_notes(beside: Sequence[EngineLedger]) -> list[str]:
    """What explains the rows that are not the closed form's, and what could not be read."""
    explanations = [f"{name}: {PATTERNS[name]}" for name in used(beside)]
    return explanations + [
        f"{one.case} is incomplete: {problem}." for one in beside for problem in one.problems
    ]


def _worst(ledger: EngineLedger) -> dict[tuple[str, str, str], Line]:
    """Per row, the line of the pipeline rank with the largest deviation."""
    first = {(line.axis, line.kind, line.purpose): line for line in reversed(ledger.lines)}
    return {key: line for key, line in first.items() if line.found or not line.is_explained}


def _traffic(item: Communication | None, line: Line | None) -> list[Text]:
    """A case's three cells; the middle one says how it stands to the closed form."""
    if item is None and line is None:
        return [Text(NONE)] * 3
    calls, logical, wire = _figures(item.calls, item.bytes, item.wire_bytes) if item else [Text("0")] * 3
    if line is None:
        return [calls, logical, wire]
    if line.state == "expected":
        return [calls, Text(logical.text, "=", "pass"), wire]
    words = line.why or f"{unexplained(line)}: the closed form has {human_bytes(line.expected)}"
    return [calls, Text(logical.text, words, "fail" if line.is_new else ""), wire]


def _figures(calls: int, logical: int, wire: int) -> list[Text]:
    return [Text(f"{calls:,}"), Text(human_bytes(logical)), Text(human_bytes(wire))]
