"""The figures of a sweep: losses, step times and peak memory of strategies; throughput over devices."""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from compare.contract.record import Record
from compare.judge.comparison import Comparison
from compare.present.tables import how_peaks
from compare.show.findings import Figure, Picture, Series
from compare.studies.sweep_outcome import FIRST, SINGLE, StrategyRow, SweepOutcome
from compare.terminal import human_bytes


def figures_of(outcome: SweepOutcome, by_engine: Mapping[str, Record]) -> list[Figure]:
    """Bars of strategies, or lines over devices."""
    if not outcome.rows:
        return []
    if outcome.scaling != "none":
        return _of_scaling(outcome)
    peaks = how_peaks(list(by_engine), list(by_engine.values()))
    return [
        _bars(
            outcome.rows,
            "Step time of each strategy",
            "The mean over steady steps of one process: an order of magnitude, and no ranking.",
            "step time, mean (ms)",
            lambda row: row.step_time_ms_mean,
            "{:,.1f} ms".format,
        ),
        _bars(
            outcome.rows,
            "Peak memory of each strategy",
            f"Of the fullest device. {peaks}",
            "peak memory (MB)",
            lambda row: row.peak_mem_bytes / 1e6,
            lambda megabytes: human_bytes(megabytes * 1e6),
        ),
    ]


def _bars(
    rows: Sequence[StrategyRow],
    title: str,
    caption: str,
    axis: str,
    value: Callable[[StrategyRow], float],
    text: Callable[[float], str],
) -> Figure:
    """Bars in groups, one for each strategy, one device first; and in each a bar for each engine."""
    engines = list(dict.fromkeys(row.engine for row in rows))
    strategies = sorted(dict.fromkeys(row.strategy for row in rows), key=lambda name: name != SINGLE)
    thick = 0.8 / len(engines)
    series = []
    for place, engine in enumerate(engines):
        own = [row for row in rows if row.engine == engine]
        above = thick * (place - (len(engines) - 1) / 2)
        series.append(
            Series(
                label=engine,
                look="bars",
                colour=place,
                thick=thick,
                x=[value(row) for row in own],
                y=[strategies.index(row.strategy) + above for row in own],
                texts=[text(value(row)) for row in own],
            )
        )
    return Figure(title=title, caption=caption, x=axis, names=strategies, series=series)


def losses(
    outcome: SweepOutcome, comparisons: Mapping[str, Comparison], records: Mapping[str, Sequence[Record]]
) -> list[Picture]:
    """The loss curves of each engine's strategies over the reference's; none where devices are scaled."""
    from compare.present.report.figures import loss_curves
    from compare.present.report.pictures import how_close

    drawn = []
    for batch, comparison in comparisons.items() if outcome.scaling == "none" else ():
        named = dict(zip(comparison.cases, records[batch], strict=True))
        engines = dict.fromkeys(record.manifest.engine for name, record in named.items() if name != FIRST)
        for engine in engines or dict.fromkeys(record.manifest.engine for record in named.values()):
            chosen = {
                FIRST if name == FIRST else name.split(".")[1]: record
                for name, record in named.items()
                if name == FIRST or record.manifest.engine == engine
            }
            names, shown = list(chosen), list(chosen.values())
            picture = loss_curves(names, shown, title=f"Loss of {engine} over steps")
            drawn.append(Picture(f"Loss: {engine}", picture, how_close(names, shown)))
    return drawn


def _of_scaling(outcome: SweepOutcome) -> list[Figure]:
    lines, fewest = _lines(outcome), outcome.devices[0]
    base = "one device" if fewest == 1 else f"{fewest} devices"
    counts = sorted({row.devices for rows in lines.values() for row in rows})
    best = max(rows[0].tokens_per_s for rows in lines.values()) / counts[0]
    ideal = Series(label="", x=counts, y=[best * count for count in counts], dash=":")
    throughput = Figure(
        title="Throughput over devices",
        caption="Of all devices. The dotted line begins with the best and grows as the devices do.",
        x="devices",
        y="tokens/s",
        y_form="{x:,.0f}",
        log="x",
        ticks={count: str(count) for count in counts},
        is_small=True,
        series=[*_curves(lines, lambda row: row.tokens_per_s), ideal],
    )
    efficiency = msgspec.structs.replace(
        throughput,
        title=f"Efficiency against {base}",
        caption=f"Throughput per device, over that of {base} of the same engine.",
        y=f"efficiency against {base}",
        y_form="{x:.0%}",
        at=1.0,
        series=_curves(lines, lambda row: row.efficiency),
    )
    return [throughput, efficiency]


def _curves(
    lines: Mapping[str, list[StrategyRow]], value: Callable[[StrategyRow], float | None]
) -> list[Series]:
    curves = []
    for place, (name, rows) in enumerate(lines.items()):
        points = [(row.devices, found) for row in rows if (found := value(row)) is not None]
        x, y = [x for x, _ in points], [y for _, y in points]
        curves.append(Series(label=name, x=x, y=y, colour=place, mark="o"))
    return curves


def _lines(outcome: SweepOutcome) -> dict[str, list[StrategyRow]]:
    """The rows of each engine and strategy by devices, each begun by its engine's one device."""
    lines: dict[str, list[StrategyRow]] = {}
    alone = {row.engine: row for row in outcome.rows if row.devices == 1}
    for row in outcome.rows:
        if row.devices > 1:
            start = [alone[row.engine]] if row.engine in alone else []
            lines.setdefault(f"{row.engine}, {row.strategy}", start).append(row)
    return lines or {engine: [row] for engine, row in alone.items()}
