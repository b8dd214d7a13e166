"""The table of a sweep."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from compare.show.findings import Column, Table, table_of
from compare.terminal import human_bytes

if TYPE_CHECKING:
    from compare.studies.sweep import StrategyRow

EXPLAINED = (
    "Loss in nats. Peak memory of the fullest device. Logical bytes: the full tensors that one device "
    "communicates in a steady step; wire bytes: what it sends, if collectives go round a ring. The verdict "
    "is of the ladder, against one unsharded device."
)


def sweep_table(rows: "Sequence[StrategyRow]", *, scaled: bool) -> Table:
    """A row for each strategy on each engine."""
    columns: list[Column[StrategyRow]] = [
        Column("engine", lambda row: row.engine),
        Column("strategy", lambda row: row.strategy),
        Column("setting", lambda row: row.variant or None),
    ]
    if scaled:
        columns += [
            Column("devices", lambda row: row.devices, "d"),
            Column("batch", lambda row: row.batch_size, "d"),
            Column("efficiency", lambda row: row.efficiency, ".0%"),
        ]
    columns += [
        Column("mean loss", lambda row: row.mean_loss, ".4f"),
        Column("final loss", lambda row: row.final_loss, ".4f"),
        Column("step, mean (ms)", lambda row: row.step_time_ms_mean, ".1f"),
        Column("step, median (ms)", lambda row: row.step_time_ms_median, ".1f"),
        Column("tokens/s", lambda row: row.tokens_per_s, ",.0f"),
        Column("MFU", lambda row: row.mfu, ".1%"),
        Column("peak memory", lambda row: row.peak_mem_bytes, human_bytes),
        Column("logical bytes", lambda row: row.comm_bytes, human_bytes),
        Column("wire bytes", lambda row: row.comm_wire_bytes, human_bytes),
        Column(
            "verdict",
            lambda row: row.verdict or "reference",
            news=lambda row: "pass" if row.passed else "fail",
        ),
    ]
    title = "Strategies over devices" if scaled else "Strategies side by side"
    return table_of(title, columns, rows, look="upright", below=EXPLAINED, words=1)
