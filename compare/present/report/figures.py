"""The curves of a report: losses, their differences, gradient norms, learning rates."""

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from compare.contract.record import Record, Step
from compare.present.report.canvas import INK, WIDTH, colour, legend_above, legend_height, marker, svg
from compare.present.report.saved import save_figure

WINDOWS = 150  # points of a curve; longer runs are reduced over windows
DASH = 2.5  # line widths
SLOTS = 6  # curves whose dashes alternate; more would leave each too little of the line
HEIGHT = 2.8  # inches without the legend
OVERLAY = (11.0, 3.8)  # inches


def loss_curves(names: list[str], records: list[Record], *, title: str = "Loss over steps") -> Markup:
    """Every engine's loss over steps, laid over each other; `title` is for those who cannot see it."""
    return _with_legend(title, names, lambda axes: _draw_losses(axes, names, records))


def gradient_norms(names: list[str], records: list[Record]) -> Markup:
    """Every engine's gradient norm before clipping, and where clipping begins."""

    def draw(axes: Axes) -> list[Line2D]:
        keys = _draw_curves(axes, names, records, lambda step: step.grad_norm)
        clip = records[0].manifest.experiment.optimizer.grad_clip
        if clip:
            keys.append(
                axes.axhline(clip, color=INK, linewidth=1, linestyle=":", label=f"clipped to {clip:g}")
            )
        axes.set(xlabel="step", ylabel=f"gradient norm{_of_window(records, 'mean')}")
        return keys

    return _with_legend("Gradient norm before clipping, over steps", names, draw)


def learning_rates(names: list[str], records: list[Record]) -> Markup:
    """Every engine's learning rate."""

    def draw(axes: Axes) -> list[Line2D]:
        keys = _draw_curves(axes, names, records, lambda step: step.lr)
        axes.set(xlabel="step", ylabel=f"learning rate{_of_window(records, 'mean')}")
        axes.set_ylim(bottom=0)
        return keys

    return _with_legend("Learning rate over steps", names, draw)


def loss_differences(names: list[str], records: list[Record]) -> Markup:
    """Difference of every other engine's loss from the first one's, relative, on a log axis."""
    title = f"Relative difference of the loss from {names[0]}, over steps"
    return _with_legend(title, names, lambda axes: _draw_differences(axes, names, records))


def save_overlay(path: Path, names: list[str], records: list[Record]) -> None:
    """Save losses and differences side by side as a picture with a white ground, through a temporary name.

    Args:
        path: of the picture; its suffix is its format: .png, .svg, .pdf.
        names: of the engines.
        records: one for each name.
    """

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        keys = _draw_losses(left, names, records)
        equal = _draw_differences(right, names, records)[len(names) - 1 :]
        figure.legend(handles=[*keys, *equal], loc="outside upper left", ncols=len(keys) + 1)

    save_figure(path, draw, size=OVERLAY)


def relative_differences(reference: Record, record: Record) -> list[float]:
    """|loss - reference's| / |reference's| at every step that both have; NaN where one is not finite."""
    pairs = zip(reference.steps, record.steps, strict=False)
    return [abs(b.loss - a.loss) / abs(a.loss) if a.loss else abs(b.loss) for a, b in pairs]


def windowed(values: list[float], reduce: Callable[[list[float]], float]) -> tuple[list[int], list[float]]:
    """A long series reduced over windows of equal length, so that curves which coincide can be told apart.

    Returns:
        The place of each window's first step, and its value; every step where there are at most WINDOWS.
    """
    length = _window_length(len(values))
    starts = list(range(0, len(values), length))
    return starts, [reduce(values[start : start + length]) for start in starts]


def _with_legend(title: str, names: list[str], draw: Callable[[Axes], list[Line2D]]) -> Markup:
    """The figure that `draw` draws, with the keys that it returns above."""
    size = (WIDTH, HEIGHT + legend_height(len(names) + 1))
    return svg(title, lambda axes: legend_above(axes, draw(axes)), size=size)


def _draw_losses(axes: Axes, names: list[str], records: list[Record]) -> list[Line2D]:
    keys = _draw_curves(axes, names, records, lambda step: step.loss)
    for index, record in enumerate(records):
        size = 3 + 4 * (len(records) - index) / len(records)  # where they coincide, one in the other
        steps = [one.step for one in record.evaluations]
        losses = [one.validation for one in record.evaluations]
        axes.plot(steps, losses, "D", color=colour(index), markersize=size, fillstyle="none")
    if any(record.evaluations for record in records):
        keys.append(Line2D([], [], color=INK, marker="D", linestyle="", fillstyle="none", label="validation"))
    axes.set(xlabel="step", ylabel=f"loss (nats){_of_window(records, 'mean')}")
    return keys


def _draw_curves(
    axes: Axes, names: list[str], records: list[Record], value_of: Callable[[Step], float]
) -> list[Line2D]:
    """The first curve as a broad pale band, the others over it in dashes that alternate; their keys.

    Curves that coincide, which is the aim, then show as one line of all their colours.
    """
    keys = []
    for index, (name, record) in enumerate(zip(names, records, strict=True)):
        values, first = [value_of(step) for step in record.steps], record.steps[0].step
        is_broad = index == 0 and len(records) > 1
        look: dict[str, Any] = {
            "color": colour(index),
            "linewidth": 6.0 if is_broad else 1.6,
            "alpha": 0.5 if is_broad else 1.0,
            "marker": marker(index) or ("o" if len(values) == 1 else ""),  # one point makes no line
            "markersize": 3.5,
        }
        dashes = "-" if index == 0 else _alternating(index - 1, len(records) - 1)
        starts, means = windowed(values, statistics.fmean)
        axes.plot([first + start for start in starts], means, linestyle=dashes, **look)
        keys.append(Line2D([], [], label=_with_end(name, values), **look))
    return keys


def _alternating(slot: int, curves: int) -> str | tuple[float, tuple[float, float]]:
    """The dashes of one of several curves: in their gaps are those of the others, if they coincide."""
    slots = min(curves, SLOTS)
    return "-" if slots == 1 else (-DASH * (slot % slots), (DASH, DASH * (slots - 1)))


def _draw_differences(axes: Axes, names: list[str], records: list[Record]) -> list[Line2D]:
    """Draw differences on a log axis; points where losses are equal to the last bit have a line of their own.

    Returns:
        A key for each curve, and one for that line if it is there.
    """
    differences = [relative_differences(records[0], record) for record in records[1:]]
    positive = [value for values in differences for value in values if value > 0 and math.isfinite(value)]
    floor = 10.0 ** (math.floor(math.log10(min(positive, default=1e-16))) - 1)
    keys = []
    for index, (name, values) in enumerate(zip(names[1:], differences, strict=True), start=1):
        starts, worst = windowed(values, max)
        axes.plot(
            [records[0].steps[0].step + start for start in starts],
            [floor if value == 0 else value for value in worst],
            color=colour(index),
            linestyle=_alternating(index - 1, len(differences)),
            marker=marker(index) or "o",
            markersize=2 + 2.5 * (len(names) - 1 - index) / len(names),  # where they coincide, rings
            linewidth=1.2,
        )
        key = Line2D([], [], color=colour(index), marker=marker(index) or "o", markersize=3.5)
        key.set_label(_with_end(name, values))
        keys.append(key)
    if any(value == 0 for values in differences for value in values):
        keys.append(axes.axhline(floor, color=INK, linewidth=1, linestyle=":", label="equal, bit for bit"))
    label = f"|loss - {names[0]}| / loss{_of_window(records, 'largest')}"
    axes.set(xlabel="step", ylabel=label, yscale="log")
    return keys


def _with_end(name: str, values: Sequence[float]) -> str:
    """The name of a curve; and from which step on it cannot be drawn, where that is so."""
    lost = next((step for step, value in enumerate(values) if not math.isfinite(value)), None)
    return name if lost is None else f"{name} (not finite from step {lost})"


def _window_length(steps: int) -> int:
    return max(1, math.ceil(steps / WINDOWS))


def _of_window(records: list[Record], what: str) -> str:
    length = _window_length(max(len(record.steps) for record in records))
    return f", {what} of {length} steps" if length > 1 else ""
