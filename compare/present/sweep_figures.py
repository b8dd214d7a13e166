"""The figures of a sweep: losses, step times and peak memory of strategies; throughput over devices."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from compare.contract.record import Record
from compare.judge.outcome import Outcome
from compare.show.findings import Figure, Picture, Series
from compare.terminal import human_bytes

if TYPE_CHECKING:
    from compare.studies.sweep import StrategyRow


def figures_of(rows: "Sequence[StrategyRow]", *, scaled: bool) -> list[Figure]:
    """Bars of strategies, or lines over devices."""
    if not rows or scaled:
        return _of_scaling(rows) if rows else []
    return [
        _bars(
            rows,
            "Step time of each strategy",
            "The mean over steady steps of one process: an order of magnitude, and no ranking.",
            "step time, mean (ms)",
            lambda row: row.step_time_ms_mean,
            "{:,.1f} ms".format,
        ),
        _bars(
            rows,
            "Peak memory of each strategy",
            "Of the fullest device.",
            "peak memory (MB)",
            lambda row: row.peak_mem_bytes / 1e6,
            lambda megabytes: human_bytes(megabytes * 1e6),
        ),
    ]


def name_of(row: "StrategyRow") -> str:
    """Its strategy and setting."""
    return f"{row.strategy} {row.variant}".strip()


def _bars(
    rows: "Sequence[StrategyRow]",
    title: str,
    caption: str,
    axis: str,
    value: "Callable[[StrategyRow], float]",
    text: Callable[[float], str],
) -> Figure:
    """Bars in groups, one for each strategy, one device first; and in each a bar for each engine."""
    engines = list(dict.fromkeys(row.engine for row in rows))
    strategies = list(dict.fromkeys(map(name_of, rows)))
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
                y=[strategies.index(name_of(row)) + above for row in own],
                texts=[text(value(row)) for row in own],
            )
        )
    return Figure(title=title, caption=caption, x=axis, names=strategies, series=series)


def losses(outcome: Outcome, records: Mapping[str, Record]) -> list[Picture]:
    """The loss curves of each engine's strategies, beside what they are held against."""
    from compare.present.report.figures import loss_curves
    from compare.present.report.pictures import how_close

    drawn = []
    for reference in [name for name in records if not outcome.cases[name].against]:
        names = [name for name in records if outcome.cases[name].against == reference]
        for engine in dict.fromkeys(outcome.cases[name].engine for name in names):
            shown = {reference: records[reference]}
            shown |= {name: records[name] for name in names if outcome.cases[name].engine == engine}
            curves = list(shown), list(shown.values())
            picture = loss_curves(*curves, title=f"Loss of {engine} over steps")
            drawn.append(Picture(f"Loss: {engine}, against {reference}", picture, how_close(*curves)))
    return drawn


def _of_scaling(rows: "Sequence[StrategyRow]") -> list[Figure]:
    lines, fewest = _lines(rows), min(row.devices for row in rows)
    base = "one device" if fewest == 1 else f"{fewest} devices"
    counts = sorted({row.devices for line in lines.values() for row in line})
    best = max(line[0].tokens_per_s for line in lines.values()) / counts[0]
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
    lines: "Mapping[str, list[StrategyRow]]", value: "Callable[[StrategyRow], float | None]"
) -> list[Series]:
    curves = []
    for place, (name, rows) in enumerate(lines.items()):
        points = [(row.devices, found) for row in rows if (found := value(row)) is not None]
        x, y = [x for x, _ in points], [y for _, y in points]
        curves.append(Series(label=name, x=x, y=y, colour=place, mark="o"))
    return curves


def _lines(rows: "Sequence[StrategyRow]") -> "dict[str, list[StrategyRow]]":
    """The rows of each engine and strategy by devices, each begun by its engine's one device."""
    lines: dict[str, list[StrategyRow]] = {}
    alone = {row.engine: row for row in rows if row.devices == 1}
    for row in rows:
        if row.devices > 1:
            start = [alone[row.engine]] if row.engine in alone else []
            lines.setdefault(f"{row.engine}, {name_of(row)}", start).append(row)
    return lines or {engine: [row] for engine, row in alone.items()}
