"""The pictures of a sweep: losses, step time and peak memory over strategies; throughput over devices."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from compare.contract.record import Record
from compare.judge.comparison import Comparison
from compare.present.report.bars import scale
from compare.present.report.canvas import INK, WIDTH, colour, legend_above, legend_height, marker, svg
from compare.present.report.figures import loss_curves
from compare.present.report.pictures import Picture, how_close, how_peaks
from compare.studies.sweep import FIRST, SINGLE
from compare.studies.sweep_outcome import Row, SweepOutcome
from compare.terminal.units import human_bytes

BAR, GAP = 0.19, 0.16  # inches
SCALING_HEIGHT = 2.6


def pictures(
    outcome: SweepOutcome, comparisons: Mapping[str, Comparison], records: Mapping[str, Sequence[Record]]
) -> list[Picture]:
    """All of them.

    Args:
        outcome: its rows.
        comparisons: by batch.
        records: by batch, of each finished case.
    """
    if not outcome.rows:
        return []
    if outcome.plan.scaling != "none":
        return _of_scaling(outcome)
    (comparison,), (found,) = comparisons.values(), records.values()
    peaks = how_peaks([row.engine for row in outcome.rows], _in_order(outcome, found))
    return [
        *_losses(comparison, found),
        Picture(
            "Step time",
            _step_times(outcome.rows),
            "The mean over steady steps of one process: an order of magnitude, and no ranking.",
        ),
        Picture("Peak memory", _peaks(outcome.rows), f"Of the fullest device. {peaks}"),
    ]


def _in_order(outcome: SweepOutcome, records: Sequence[Record]) -> list[Record]:
    """A record of each row's engine: all of an engine's are measured alike."""
    by_engine = {record.manifest.engine: record for record in records}
    return [by_engine[row.engine] for row in outcome.rows]


def _losses(comparison: Comparison, records: Sequence[Record]) -> list[Picture]:
    """A picture for each engine: the reference, and its strategies over it."""
    named = dict(zip(comparison.cases, records, strict=True))
    engines = dict.fromkeys(record.manifest.engine for name, record in named.items() if name != FIRST)
    drawn = []
    for engine in engines or [records[0].manifest.engine]:
        chosen = {
            FIRST if name == FIRST else name.split(".")[1]: record
            for name, record in named.items()
            if name == FIRST or record.manifest.engine == engine
        }
        names, shown = list(chosen), list(chosen.values())
        picture = loss_curves(names, shown, title=f"Loss of {engine} over steps")
        drawn.append(Picture(f"Loss: {engine}", picture, how_close(names, shown)))
    return drawn


def _step_times(rows: Sequence[Row]) -> Markup:
    values = [row.step_time_ms_mean for row in rows]
    labels = [f"{value:,.1f} ms" for value in values]
    return _grouped("Step time of each strategy", rows, values, labels, "step time, mean (ms)")


def _peaks(rows: Sequence[Row]) -> Markup:
    sizes = [row.peak_mem_bytes for row in rows]
    factor, unit = scale(sizes)
    labels = [human_bytes(size) for size in sizes]
    values = [size / factor for size in sizes]
    return _grouped("Peak memory of each strategy", rows, values, labels, f"peak memory ({unit})")


def _grouped(
    title: str, rows: Sequence[Row], values: Sequence[float], labels: Sequence[str], axis: str
) -> Markup:
    """Bars in groups, one for each strategy, and in each a bar for each engine, in that engine's colour."""
    engines = list(dict.fromkeys(row.engine for row in rows))
    strategies = list(dict.fromkeys(row.strategy for row in rows))
    strategies.sort(
        key=lambda strategy: strategy != SINGLE
    )  # what the others are measured against comes first
    places, ticks, end = {}, [], 0.0
    for strategy in strategies:
        inside = [index for index, row in enumerate(rows) if row.strategy == strategy]
        ticks.append(end + (len(inside) - 1) / 2)
        places |= {index: end + place for place, index in enumerate(inside)}
        end += len(inside) + GAP / BAR

    def draw(axes: Axes) -> None:
        order = range(len(rows))
        colours = [colour(engines.index(row.engine)) for row in rows]
        axes.barh([places[index] for index in order], values, height=0.84, color=colours)
        for index in order:
            axes.annotate(
                labels[index],
                (values[index], places[index]),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize="small",
            )
        axes.set_yticks(ticks, strategies)
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.margins(x=0.2, y=0.02)
        axes.set(xlabel=axis)
        if len(engines) > 1:
            legend_above(axes, [Patch(color=colour(i), label=engine) for i, engine in enumerate(engines)])

    legend = legend_height(len(engines)) if len(engines) > 1 else 0.0
    return svg(title, draw, size=(WIDTH, 0.6 + legend + BAR * end))


def _of_scaling(outcome: SweepOutcome) -> list[Picture]:
    lines = _lines(outcome)
    fewest = outcome.plan.devices[0]
    ideal = "Over all devices. The dotted line begins with the best and grows in proportion to the devices."
    base = "one device" if fewest == 1 else f"{fewest} devices"
    return [
        Picture(
            "Throughput",
            _over_devices("Throughput over devices", lines, "tokens/s", lambda row: row.tokens_per_s, True),
            ideal,
        ),
        Picture(
            "Efficiency",
            _over_devices(
                f"Efficiency against {base}", lines, f"efficiency against {base}", lambda row: row.efficiency
            ),
            f"Throughput per device, over that of {base} of the same engine.",
        ),
    ]


def _lines(outcome: SweepOutcome) -> dict[str, list[Row]]:
    """The rows of each engine and strategy by devices, each begun by its engine's one device."""
    lines: dict[str, list[Row]] = {}
    alone = {row.engine: row for row in outcome.rows if row.devices == 1}
    for row in outcome.rows:
        if row.devices > 1:
            start = [alone[row.engine]] if row.engine in alone else []
            lines.setdefault(f"{row.engine}, {row.strategy}", start).append(row)
    return lines or {engine: [row] for engine, row in alone.items()}


def _over_devices(
    title: str,
    lines: Mapping[str, list[Row]],
    axis: str,
    value: Callable[[Row], float | None],
    has_ideal: bool = False,
) -> Markup:
    def draw(axes: Axes) -> None:
        keys = []
        for index, (name, rows) in enumerate(lines.items()):
            points = [(row.devices, found) for row in rows if (found := value(row)) is not None]
            look: dict[str, Any] = {
                "color": colour(index),
                "marker": marker(index) or "o",
                "markersize": 4,
                "linewidth": 1.6,
            }
            axes.plot([x for x, _ in points], [y for _, y in points], **look)
            keys.append(Line2D([], [], label=name, **look))
        counts = sorted({row.devices for rows in lines.values() for row in rows})
        if has_ideal:
            best = max(value(rows[0]) or 0.0 for rows in lines.values()) / counts[0]
            axes.plot(counts, [best * count for count in counts], color=INK, linewidth=1, linestyle=":")
            axes.yaxis.set_major_formatter("{x:,.0f}")
        else:
            axes.axhline(1.0, color=INK, linewidth=1, linestyle=":")
            axes.yaxis.set_major_formatter("{x:.0%}")
        axes.set(xlabel="devices", ylabel=axis, xscale="log")
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_xticks([], minor=True)
        axes.set_ylim(bottom=0)
        legend_above(axes, keys)

    return svg(title, draw, size=(WIDTH, SCALING_HEIGHT + legend_height(len(lines))))
