"""The table and the figures of a sweep."""

from collections.abc import Callable, Mapping, Sequence
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
    *("final_loss", "mean_loss", "step_time_ms_median", "tokens_per_s"),
    *("mfu", "peak_mem_bytes", "comm_bytes"),
)
EXPLAINED = (
    "Memory is of the fullest device, communication the full tensors of one device in a steady step. The "
    "verdict is of the ladder, against one unsharded device."
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
    title = "Strategies over devices" if scaled else "Strategies side by side"
    return table_of(title, columns, rows, below=EXPLAINED, words=1)


def loss_figures(outcome: Outcome, records: Mapping[str, Record]) -> list[Figure]:
    """The loss curves of each engine's strategies, beside what they are held against."""
    figures = []
    for reference in [name for name in records if not outcome.cases[name].against]:
        names = [name for name in records if outcome.cases[name].against == reference]
        for engine in dict.fromkeys(outcome.cases[name].engine for name in names):
            of_engine = {name: records[name] for name in names if outcome.cases[name].engine == engine}
            title = f"Loss of {engine}, against {reference}"
            figures.append(loss_figure({reference: records[reference], **of_engine}, title))
    return figures


def scaling_figures(rows: "Sequence[StrategyRow]") -> list[Figure]:
    """Throughput and efficiency over numbers of devices, a line for each engine and strategy."""
    alone = {row.engine: row for row in rows if row.devices == 1}
    lines: dict[str, list[StrategyRow]] = {}
    for row in (row for row in rows if row.devices > 1):
        start = [alone[row.engine]] if row.engine in alone else []
        lines.setdefault(f"{row.engine}, {row.strategy} {row.variant}".strip(), start).append(row)
    lines = lines or {engine: [row] for engine, row in alone.items()}
    counts = sorted({row.devices for line in lines.values() for row in line})
    base = "one device" if counts[0] == 1 else f"{counts[0]} devices"
    best = max(line[0].tokens_per_s for line in lines.values()) / counts[0]

    def over_devices(axes: "Axes", value: "Callable[[StrategyRow], float | None]", y: str, form: str) -> None:
        for number, (name, line) in enumerate(lines.items()):
            points = [(row.devices, height) for row in line if (height := value(row)) is not None]
            axes.plot(*zip(*points, strict=True), "o-", color=colour(number), label=name, markersize=4)
        axes.set(xlabel="devices", ylabel=y, xscale="log")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(form)
        ticks(axes, {count: str(count) for count in counts})

    def throughput(axes: "Axes") -> None:
        over_devices(axes, lambda row: row.tokens_per_s, "tokens/s", "{x:,.0f}")
        axes.plot(counts, [best * count for count in counts], ":", color=INK, linewidth=1)

    def efficiency(axes: "Axes") -> None:
        over_devices(axes, lambda row: row.efficiency, f"efficiency against {base}", "{x:.0%}")
        axes.axhline(1.0, color=INK, linewidth=0.8)

    return [
        Figure(
            title="Throughput over devices",
            caption="Of all devices. The dotted line begins with the best and grows as the devices do.",
            draw=throughput,
        ),
        Figure(
            title=f"Efficiency against {base}",
            caption=f"Throughput per device, over that of {base} of the same engine.",
            draw=efficiency,
        ),
    ]
