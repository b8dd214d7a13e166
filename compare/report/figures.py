"""The pictures of a report, as SVG text that takes its ink from the page: readable in light and dark."""

import io
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compare.contract.record import Record, write_atomically
from compare.costs import Cost
from compare.units import human_bytes

INK = "#010203"  # a colour nothing else has: replaced by the page's own text colour
OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
WINDOWS = 150  # points of a curve; longer runs are reduced over windows
DASHES = ((), (6, 2), (2, 2), (8, 2, 2, 2))  # curves that coincide must all stay visible

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "shardpair",  # the same figures give the same bytes
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}


def loss_curves(names: list[str], records: list[Record]) -> str:
    """Every engine's loss over steps, laid over each other."""
    return _svg(lambda axes: _draw_losses(axes, names, records), size=(6.4, 3.6))


def loss_differences(names: list[str], records: list[Record]) -> str:
    """How far every other engine's loss is from the first one's, relative, on a log axis."""
    return _svg(lambda axes: _draw_differences(axes, names, records), size=(6.4, 3.6))


def save_overlay(path: Path, names: list[str], records: list[Record]) -> None:
    """Save losses and differences side by side as a picture with a white ground, through a temporary name.

    Args:
        path: of the picture; its suffix is its format: .png, .svg, .pdf.
        names: of the engines.
        records: one for each name.
    """
    ink = {key: "#222222" if value == INK else value for key, value in STYLE.items()}
    with pyplot.rc_context(rc=ink | {"figure.facecolor": "white"}):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
        _draw_losses(left, names, records)
        _draw_differences(right, names, records)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=path.suffix.lstrip("."), dpi=130)
        pyplot.close(figure)
    write_atomically(path, buffer.getvalue())


def _draw_losses(axes: Axes, names: list[str], records: list[Record]) -> None:
    for index, (name, record) in enumerate(zip(names, records, strict=True)):
        losses = [step.loss for step in record.steps]
        axes.plot(
            *windowed(losses, statistics.fmean),
            label=name,
            color=_colour(index),
            dashes=DASHES[index % len(DASHES)],
            linewidth=2.6 - 0.4 * (index % len(DASHES)),
        )
    axes.set(xlabel="step", ylabel=f"loss (nats){_of_window(records, 'mean')}")
    axes.legend()


def _draw_differences(axes: Axes, names: list[str], records: list[Record]) -> None:
    first = records[0].steps
    for index, (name, record) in enumerate(zip(names[1:], records[1:], strict=True), start=1):
        off = [abs(b.loss - a.loss) / abs(a.loss) for a, b in zip(first, record.steps, strict=False)]
        steps, worst = windowed(off, max)
        shown = [value or float("nan") for value in worst]  # equal losses have no place on a log axis
        axes.plot(
            steps,
            shown,
            label=name,
            color=_colour(index),
            dashes=DASHES[index % len(DASHES)],
            marker="." if len(steps) <= WINDOWS else None,
            linewidth=1.4,
        )
    label = f"|loss - {names[0]}| / loss{_of_window(records, 'largest')}"
    axes.set(xlabel="step", ylabel=label, yscale="log")
    axes.legend()


def windowed(values: list[float], reduce: Callable[[list[float]], float]) -> tuple[list[int], list[float]]:
    """A long series reduced over windows of equal length, so that curves which coincide can be told apart.

    Returns:
        The first step of each window and its value; every step where there are at most WINDOWS.
    """
    length = _window_length(len(values))
    starts = list(range(0, len(values), length))
    return starts, [reduce(values[start : start + length]) for start in starts]


def _window_length(steps: int) -> int:
    return max(1, math.ceil(steps / WINDOWS))


def _of_window(records: list[Record], what: str) -> str:
    length = _window_length(len(records[0].steps))
    return f", {what} of {length} steps" if length > 1 else ""


def step_times(names: list[str], costs: list[Cost]) -> str:
    """Median step time, with the 95th percentile as a whisker."""

    def draw(axes: Axes) -> None:
        medians = [cost.step_time_ms_median for cost in costs]
        above = [max(cost.step_time_ms_p95 - cost.step_time_ms_median, 0.0) for cost in costs]
        _bars(axes, names, medians, [f"{value:.1f} ms" for value in medians], above)
        axes.set(xlabel="step time (ms), median; whisker to p95")

    return _svg(draw, size=(6.4, 0.6 + 0.5 * len(names)))


def peak_memory(names: list[str], costs: list[Cost]) -> str:
    """Peak memory of the fullest device."""

    def draw(axes: Axes) -> None:
        peaks = [cost.peak_mem_bytes for cost in costs]
        _bars(axes, names, [peak / 1e6 for peak in peaks], [human_bytes(peak) for peak in peaks])
        axes.set(xlabel="peak memory per device (MB)")

    return _svg(draw, size=(6.4, 0.6 + 0.5 * len(names)))


def communication(names: list[str], costs: list[Cost]) -> str:
    """Bytes and collectives of one step."""

    def draw(axes: Axes) -> None:
        labels = [f"{human_bytes(cost.comm_bytes)} in {cost.comm_calls} calls" for cost in costs]
        _bars(axes, names, [cost.comm_bytes / 1e6 for cost in costs], labels)
        axes.set(xlabel="communicated per device and step (MB, full tensors)")

    return _svg(draw, size=(6.4, 0.6 + 0.5 * len(names)))


def _bars(
    axes: Axes, names: list[str], values: list[float], labels: list[str], above: list[float] | None = None
) -> None:
    places = range(len(names))
    colours = [_colour(index) for index in places]
    whiskers = [[0.0] * len(names), above] if above else None
    axes.barh(places, values, color=colours, xerr=whiskers, error_kw={"ecolor": INK, "capsize": 3})
    for place, value, label in zip(places, values, labels, strict=True):
        whisker = above[place] if above else 0.0
        axes.annotate(label, (value + whisker, place), xytext=(6, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.margins(x=0.3)


def _colour(index: int) -> str:
    return OKABE_ITO[index % len(OKABE_ITO)]


def _svg(draw: Callable[[Axes], None], *, size: tuple[float, float]) -> str:
    """Draw on fresh axes of `size` inches; the <svg> element, with INK as the page's text colour."""
    with pyplot.rc_context(rc=STYLE):
        figure: Figure = pyplot.figure(figsize=size, layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")
