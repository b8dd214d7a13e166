"""The table and the figures of a sweep."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from compare.contract.record import Record
from compare.judge.metrics import METRICS
from compare.judge.outcome import Outcome
from compare.present.report import loss_figure
from compare.show.figures import INK, Figure, colour, ticks
from compare.show.findings import Column, Table, table_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from compare.studies.sweep import StrategyRow

SHOWN = (
    "final_loss",
    "mean_loss",
    "step_time_ms_median",
    "tokens_per_s",
    "mfu",
    "peak_mem_bytes",
    "comm_bytes",
)


def sweep_table(rows: "Sequence[StrategyRow]", *, scaled: bool) -> Table:
    """A row for each strategy on each engine."""
    columns: list[Column[StrategyRow]] = [
        Column("engine", lambda row: row.engine),
        Column("strategy", lambda row: row.strategy),
        Column("setting", lambda row: row.variant or None),
        *(
            Column(metric.label, lambda row, key=metric.key: getattr(row, key), metric.form)
            for metric in METRICS
            if metric.key in SHOWN
        ),
        Column(
            "verdict",
            lambda row: row.verdict or "reference",
            news=lambda row: "pass" if row.passed else "fail",
        ),
    ]
    if scaled:
        columns[3:3] = [
            Column("devices", lambda row: row.devices, "d"),
            Column("batch", lambda row: row.batch_size, "d"),
            Column("efficiency", lambda row: row.efficiency, ".0%"),
        ]
    below = (
        "Memory is of the fullest device, communication the full tensors of one device in a steady step. The "
        "verdict is of the ladder, against one unsharded device."
    )
    title = "Strategies over devices" if scaled else "Strategies side by side"
    return table_of(title, columns, rows, below=below, words=1)


def loss_figures(outcome: Outcome, records: Mapping[str, Record]) -> list[Figure]:
    """The loss curves of each engine's strategies, beside what they are held against."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in records:
        if against := outcome.cases[name].against:
            groups.setdefault((outcome.cases[name].engine, against), [against]).append(name)
    return [
        loss_figure({name: records[name] for name in names}, f"Loss of {engine}, against {against}")
        for (engine, against), names in groups.items()
        if against in records
    ]


def scaling_figure(rows: "Sequence[StrategyRow]") -> Figure:
    """Throughput over numbers of devices, a line for each engine and strategy."""
    alone = {row.engine: row for row in rows if row.devices == 1}
    lines: dict[str, list[StrategyRow]] = {}
    for row in (row for row in rows if row.devices > 1):
        start = [alone[row.engine]] if row.engine in alone else []
        lines.setdefault(f"{row.engine}, {row.strategy} {row.variant}".strip(), start).append(row)
    lines = lines or {engine: [row] for engine, row in alone.items()}
    counts = sorted({row.devices for line in lines.values() for row in line})
    best = max(line[0].tokens_per_s for line in lines.values()) / counts[0]

    def draw(axes: "Axes") -> None:
        for number, (name, line) in enumerate(lines.items()):
            points = [[row.devices for row in line], [row.tokens_per_s for row in line]]
            axes.plot(*points, "o-", color=colour(number), label=name, markersize=4)
        axes.plot(counts, [best * count for count in counts], ":", color=INK, linewidth=1)
        axes.set(xlabel="devices", ylabel="tokens/s", xscale="log")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        ticks(axes, {count: str(count) for count in counts})

    caption = "Of all devices. The dotted line begins with the best and grows as the devices do."
    return Figure(title="Throughput over devices", caption=caption, draw=draw)
