"""Communication of the cases in a step, side by side."""

from compare.contract.communication import Communication
from compare.judge.costs import Cost
from compare.present.report.tables import NONE, Row, Table, Text
from compare.terminal.units import human_bytes


def ledger_table(names: list[str], ledgers: list[list[Communication]], costs: list[Cost]) -> Table:
    """Communication of each case in a step: a row for each collective, axis and purpose.

    Args:
        names: of the cases.
        ledgers: one for each.
        costs: one for each: their totals.
    """
    items = [{(one.axis, one.kind, one.purpose): one for one in ledger} for ledger in ledgers]
    rows = []
    for key in sorted({key for ledger in items for key in ledger}):
        axis, kind, purpose = key
        cells = [text for ledger in items for text in _traffic(ledger.get(key))]
        rows.append(Row(Text(f"{kind} over {axis}", purpose), cells))
    totals = [
        text for cost in costs for text in _figures(cost.comm_calls, cost.comm_bytes, cost.comm_wire_bytes)
    ]
    rows.append(Row(Text("all"), totals, is_total=True))
    columns = ["calls", "logical", "wire"] * len(names)
    return Table(name="Communication", corner="per device and step", columns=columns, rows=rows, groups=names)


def _traffic(item: Communication | None) -> list[Text]:
    return _figures(item.calls, item.bytes, item.wire_bytes) if item else [Text(NONE)] * 3


def _figures(calls: int, logical: int, wire: int) -> list[Text]:
    return [Text(f"{calls:,}"), Text(human_bytes(logical)), Text(human_bytes(wire))]
