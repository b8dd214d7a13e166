"""The bars of a report: step time, peak memory, memory at rest, communication; one for each case."""

from collections.abc import Sequence

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from compare.judge.closed_forms.memory import KINDS
from compare.judge.costs import Cost
from compare.present.report.canvas import INK, WIDTH, colour, legend_above, legend_height, svg
from compare.present.report.memory import AtRest
from compare.present.report.slim_svg import value_of
from compare.terminal import human_bytes

KIND_COLOURS = {"parameters": "#56B4E9", "gradients": "#E69F00", "optimizer": "#009E73"}
CROWDED = 6  # cases from which on bars stand closer


def step_times(names: list[str], costs: list[Cost]) -> Markup:
    """Median step time, with the 95th percentile as a whisker."""

    def draw(axes: Axes) -> None:
        medians = [cost.step_time_ms_median for cost in costs]
        above = [max(cost.step_time_ms_p95 - cost.step_time_ms_median, 0.0) for cost in costs]
        _bars(axes, names, medians, [f"{value:,.1f} ms" for value in medians], above)
        axes.set(xlabel="step time (ms), median; whisker to p95")

    return svg("Step time of each engine", draw, size=_size(names))


def peak_memory(names: list[str], costs: list[Cost]) -> Markup:
    """Peak memory of the fullest device."""
    peaks = [cost.peak_mem_bytes for cost in costs]
    return _byte_bars(
        "Peak memory of the fullest device", names, peaks, [human_bytes(peak) for peak in peaks]
    )


def communication(names: list[str], costs: list[Cost]) -> Markup:
    """Logical bytes and collectives of one step."""
    labels = [f"{human_bytes(cost.comm_bytes)}, calls: {cost.comm_calls:,}" for cost in costs]
    sizes = [cost.comm_bytes for cost in costs]
    return _byte_bars("Logical bytes of one step, for each device", names, sizes, labels)


def memory_at_rest(names: list[str], held: Sequence[AtRest | None]) -> Markup:
    """Parameters, gradients and optimizer state of the fullest device, and a mark at the closed form."""
    factor, unit = scale([sum(one.fullest.values()) for one in held if one])

    def draw(axes: Axes) -> None:
        for place, one in enumerate(held):
            end = _draw_kinds(axes, place, one, factor) if one else 0.0
            label = human_bytes(sum(one.fullest.values())) if one else "not recorded"
            axes.annotate(label, (end, place), xytext=(6, 0), textcoords="offset points", va="center")
        _finish(axes, names)
        axes.set(xlabel=f"at rest on the fullest device ({unit}); line: closed form")
        legend_above(axes, [Patch(color=KIND_COLOURS[kind], label=kind) for kind in KINDS])

    width, height = _size(names)
    return svg(
        "Memory at rest on the fullest device, by kind",
        draw,
        size=(width, height + legend_height(len(KINDS))),
    )


def _draw_kinds(axes: Axes, place: int, held: AtRest, factor: float) -> float:
    """One case's kinds end to end, and the mark of the closed form; where the further of both ends."""
    end, expected = 0.0, sum(held.expected.values()) / factor
    for kind, size in held.fullest.items():
        (bar,) = axes.barh(place, size / factor, left=end, height=0.6, color=KIND_COLOURS[kind])
        bar.set_gid(value_of(f"{human_bytes(size)} {kind}, closed form {human_bytes(held.expected[kind])}"))
        end += size / factor
    axes.vlines(expected, place - 0.4, place + 0.4, color=INK, linewidth=1.6)
    return max(end, expected)


def _byte_bars(title: str, names: list[str], sizes: Sequence[float], labels: list[str]) -> Markup:
    factor, unit = scale(sizes)

    def draw(axes: Axes) -> None:
        _bars(axes, names, [size / factor for size in sizes], labels)
        axes.set(xlabel=f"{title[0].lower()}{title[1:]} ({unit})")

    return svg(title, draw, size=_size(names))


def _bars(
    axes: Axes, names: list[str], values: list[float], labels: list[str], above: list[float] | None = None
) -> None:
    places = range(len(names))
    whiskers = [[0.0] * len(names), above] if above else None
    axes.barh(
        places,
        values,
        height=0.6,
        color=[colour(index) for index in places],
        xerr=whiskers,
        error_kw={"ecolor": INK, "capsize": 3},
    )
    for place, value, label in zip(places, values, labels, strict=True):
        whisker = above[place] if above else 0.0
        axes.annotate(label, (value + whisker, place), xytext=(6, 0), textcoords="offset points", va="center")
    _finish(axes, names)


def _finish(axes: Axes, names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.margins(x=0.3)


def scale(sizes: Sequence[float]) -> tuple[float, str]:
    """The unit in which the largest of some sizes has one to three digits before the point."""
    largest = max(sizes, default=0)
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= factor:
            return factor, unit
    return 1.0, "B"


def _size(names: list[str]) -> tuple[float, float]:
    return WIDTH, 0.7 + (0.26 if len(names) > CROWDED else 0.42) * len(names)
