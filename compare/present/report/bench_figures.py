"""The pictures of a bench: ratios with intervals, step times over rounds, what goes before the steps."""

from collections.abc import Sequence
from itertools import pairwise

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from compare.judge.bench_rows import BenchRow
from compare.judge.statistics import Estimate
from compare.present.report.canvas import INK, WIDTH, colour, legend_above, legend_height, svg

ROW, FRAME = 0.34, 0.8  # inches: of a row, and of what is around them
WALL, CPU = colour(0), colour(1)
BEFORE = {
    "start-up": ("start_up_s", colour(5)),
    "compilation": ("compile_s", colour(4)),
    "first step": ("first_step_s", colour(2)),
}


def ratio_picture(rows: Sequence[BenchRow], baseline: str) -> Markup:
    """Each case's wall and CPU time over its baseline's, the interval as a whisker; less is faster.

    Args:
        rows: those that have a ratio.
        baseline: its name.
    """

    def draw(axes: Axes) -> None:
        for place, row in enumerate(rows):
            _whisker(axes, row.wall_ratio, place - 0.13, WALL, "o")
            _whisker(axes, row.cpu_ratio, place + 0.13, CPU, "s")
        axes.axvline(1.0, color=INK, linewidth=1, linestyle=":")
        _name_rows(axes, rows)
        axes.set(xlabel=f"times {baseline}; less is faster")
        keys = [
            Line2D([], [], color=WALL, marker="o", linestyle="", label="wall time"),
            Line2D([], [], color=CPU, marker="s", linestyle="", label="CPU time"),
        ]
        legend_above(axes, keys)

    return svg(f"Step time over that of {baseline}, with intervals", draw, size=_size(rows, keys=2))


def step_picture(rows: Sequence[BenchRow]) -> Markup:
    """Each case's wall time of a step: the median over rounds, and the range of the rounds as a whisker."""

    def draw(axes: Axes) -> None:
        places = range(len(rows))
        whiskers = [
            [row.wall_ms - row.wall_ms_least for row in rows],
            [row.wall_ms_most - row.wall_ms for row in rows],
        ]
        axes.barh(
            places,
            [row.wall_ms for row in rows],
            height=0.6,
            color=[colour(_colours(rows)[row.label]) for row in rows],
            xerr=whiskers,
            error_kw={"ecolor": INK, "capsize": 3},
        )
        for place, row in enumerate(rows):
            _annotate(axes, row.wall_ms_most, place, f"{row.wall_ms:,.1f} ms")
        _name_rows(axes, rows)
        axes.margins(x=0.25)
        axes.set_xlim(left=0)
        axes.set(xlabel="step time (ms), median; whisker over rounds")

    return svg("Wall time of a step in a window", draw, size=_size(rows))


def before_picture(rows: Sequence[BenchRow]) -> Markup:
    """Seconds before the steady steps: starting, compiling, and the first step."""

    def draw(axes: Axes) -> None:
        for place, row in enumerate(rows):
            end = 0.0
            for field, shade in BEFORE.values():
                axes.barh(place, getattr(row, field), left=end, height=0.6, color=shade)
                end += getattr(row, field)
            _annotate(axes, end, place, f"{end:.1f} s")
        _name_rows(axes, rows)
        axes.margins(x=0.2)
        axes.set_xlim(left=0)
        axes.set(xlabel="seconds")
        legend_above(axes, [Patch(color=shade, label=name) for name, (_, shade) in BEFORE.items()])

    return svg("Seconds before the steady steps", draw, size=_size(rows, keys=len(BEFORE)))


def _whisker(axes: Axes, ratio: Estimate | None, place: float, shade: str, mark: str) -> None:
    if ratio is None:
        return
    low = ratio.median if ratio.low is None else ratio.low
    high = ratio.median if ratio.high is None else ratio.high
    axes.hlines(place, low, high, color=shade, linewidth=1.6)
    axes.plot([ratio.median], [place], mark, color=shade, markersize=4.5)


def _annotate(axes: Axes, end: float, place: int, text: str) -> None:
    axes.annotate(text, (end, place), xytext=(6, 0), textcoords="offset points", va="center")


def _name_rows(axes: Axes, rows: Sequence[BenchRow]) -> None:
    """Rows from above, with a thin line between two blocks."""
    axes.set_yticks(range(len(rows)), [f"{row.label}\n{row.block}" for row in rows], fontsize="small")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    for place, (above, below) in enumerate(pairwise(rows)):
        if above.block != below.block:
            axes.axhline(place + 0.5, color=INK, linewidth=0.4)


def _colours(rows: Sequence[BenchRow]) -> dict[str, int]:
    """The number of a label's colour: the same in every block."""
    return {label: number for number, label in enumerate(dict.fromkeys(row.label for row in rows))}


def _size(rows: Sequence[BenchRow], *, keys: int = 0) -> tuple[float, float]:
    return WIDTH, FRAME + ROW * len(rows) + legend_height(keys)
