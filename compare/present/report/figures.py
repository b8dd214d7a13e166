"""The curves of a report: losses, their differences, gradient norms, learning rates, step times."""

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from compare.contract.record import Record
from compare.judge.costs import cost_of, steady_steps
from compare.present.report.canvas import INK, WIDTH, colour, legend_above, legend_height, marker, svg
from compare.present.report.curves import StepCurve, curve, curves_of, readings_of, window_length
from compare.present.report.saved import save_figure

DASH = 2.5  # line widths
MARKED = 30  # points of a curve that have a marker
SLOTS = 6  # curves whose dashes alternate; more would leave each too little of the line
HICCUP = 3  # times p95: a step that a busy machine held up is left out of the frame
HEIGHT = 2.8  # inches without the legend
OVERLAY = (11.0, 3.8)  # inches


def loss_curves(names: list[str], records: list[Record], *, title: str = "Loss over steps") -> Markup:
    """Every engine's loss over steps, laid over each other; `title` is for those who cannot see it."""
    curves = _losses(names, records)
    return _figure(title, curves, lambda axes: _draw_losses(axes, curves, records), form=".4f")


def gradient_norms(names: list[str], records: list[Record]) -> Markup:
    """Every engine's gradient norm before clipping, and where clipping begins."""
    curves = curves_of(names, records, lambda step: step.grad_norm)

    def draw(axes: Axes) -> list[Line2D]:
        keys = _draw_curves(axes, curves)
        clip = records[0].manifest.experiment.optimizer.grad_clip
        if clip:
            keys.append(
                axes.axhline(clip, color=INK, linewidth=1, linestyle=":", label=f"clipped to {clip:g}")
            )
        axes.set(xlabel="step", ylabel=f"gradient norm{_of_window(curves, 'mean')}")
        return keys

    return _figure("Gradient norm before clipping, over steps", curves, draw, form=".4g")


def learning_rates(names: list[str], records: list[Record]) -> Markup:
    """Every engine's learning rate."""
    curves = curves_of(names, records, lambda step: step.lr)

    def draw(axes: Axes) -> list[Line2D]:
        keys = _draw_curves(axes, curves)
        axes.set(xlabel="step", ylabel=f"learning rate{_of_window(curves, 'mean')}")
        axes.set_ylim(bottom=0)
        return keys

    return _figure("Learning rate over steps", curves, draw, form=".3e")


def times_over_steps(names: list[str], records: list[Record]) -> Markup:
    """Every engine's step time over its steady steps, up to `HICCUP` times the slowest engine's p95."""
    steady = [steady_steps(record) for record in records]
    curves = [
        curve(name, steps, [step.step_time_ms for step in steps], statistics.median)
        for name, steps in zip(names, steady, strict=True)
    ]

    def draw(axes: Axes) -> list[Line2D]:
        keys = []
        for index, one in enumerate(curves):
            look: dict[str, Any] = {"color": colour(index), "marker": _mark(index, one), "markersize": 3.5}
            axes.plot(one.steps, one.values, linewidth=1.2, **look)
            keys.append(Line2D([], [], label=one.title, **look))
        slowest = max(cost_of(record).step_time_ms_p95 for record in records)
        largest = max(value for one in curves for value in one.values)
        axes.set(xlabel="step", ylabel=f"step time (ms){_of_window(curves, 'median')}")
        axes.set_ylim(0, 1.05 * min(largest, HICCUP * slowest))
        return keys

    return _figure("Step time over steps", curves, draw, form=".1f")


def loss_differences(names: list[str], records: list[Record]) -> Markup:
    """Difference of every other engine's loss from the first one's, relative, on a log axis."""
    title = f"Relative difference of the loss from {names[0]}, over steps"
    curves = _differences(names, records)
    return _figure(title, curves, lambda axes: _draw_differences(axes, names, curves), form=".1e")


def save_overlay(path: Path, names: list[str], records: list[Record]) -> None:
    """Save losses and differences side by side as a picture with a white ground, through a temporary name.

    Args:
        path: of the picture; its suffix is its format: .png, .svg, .pdf.
        names: of the engines.
        records: one for each name.
    """

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        keys = _draw_losses(left, _losses(names, records), records)
        equal = _draw_differences(right, names, _differences(names, records))[len(names) - 1 :]
        figure.legend(handles=[*keys, *equal], loc="outside upper left", ncols=len(keys) + 1)

    save_figure(path, draw, size=OVERLAY)


def relative_differences(reference: Record, record: Record) -> list[float]:
    """|loss - reference's| / |reference's| at every step that both have; NaN where one is not finite."""
    pairs = zip(reference.steps, record.steps, strict=False)
    return [abs(b.loss - a.loss) / abs(a.loss) if a.loss else abs(b.loss) for a, b in pairs]


def _losses(names: list[str], records: list[Record]) -> list[StepCurve]:
    return curves_of(names, records, lambda step: step.loss)


def _differences(names: list[str], records: list[Record]) -> list[StepCurve]:
    """Of every case but the first, the largest of each window."""
    return [
        curve(name, records[0].steps, relative_differences(records[0], record), max)
        for name, record in zip(names[1:], records[1:], strict=True)
    ]


def _figure(
    title: str, curves: list[StepCurve], draw: Callable[[Axes], list[Line2D]], *, form: str
) -> Markup:
    """The figure that `draw` draws, with the keys that it returns above, and its values to point at."""
    size = (WIDTH, HEIGHT + legend_height(len(curves) + 1))
    readings = readings_of(curves, form)
    return svg(title, lambda axes: legend_above(axes, draw(axes)), size=size, readings=readings)


def _draw_losses(axes: Axes, curves: list[StepCurve], records: list[Record]) -> list[Line2D]:
    keys = _draw_curves(axes, curves)
    for index, record in enumerate(records):
        size = 3 + 4 * (len(records) - index) / len(records)  # where they coincide, one in the other
        steps = [one.step for one in record.evaluations]
        losses = [one.validation for one in record.evaluations]
        axes.plot(steps, losses, "D", color=colour(index), markersize=size, fillstyle="none")
    if any(record.evaluations for record in records):
        keys.append(Line2D([], [], color=INK, marker="D", linestyle="", fillstyle="none", label="validation"))
    axes.set(xlabel="step", ylabel=f"loss (nats){_of_window(curves, 'mean')}")
    return keys


def _draw_curves(axes: Axes, curves: list[StepCurve]) -> list[Line2D]:
    """The first curve as a broad pale band, the others over it in dashes that alternate; their keys.

    Curves that coincide, which is the aim, then show as one line of all their colours.
    """
    keys = []
    for index, one in enumerate(curves):
        is_broad = index == 0 and len(curves) > 1
        look: dict[str, Any] = {
            "color": colour(index),
            "linewidth": 6.0 if is_broad else 1.6,
            "alpha": 0.5 if is_broad else 1.0,
            "marker": _mark(index, one),
            "markersize": 3.5,
        }
        dashes = "-" if index == 0 else _alternating(index - 1, len(curves) - 1)
        axes.plot(one.steps, one.values, linestyle=dashes, **look)
        keys.append(Line2D([], [], label=one.title, **look))
    return keys


def _mark(index: int, one: StepCurve) -> str:
    """A case's marker; one point makes no line, and is a dot."""
    return marker(index) or ("o" if len(one.whole) == 1 else "")


def _alternating(slot: int, curves: int) -> str | tuple[float, tuple[float, float]]:
    """The dashes of one of several curves: in their gaps are those of the others, if they coincide."""
    slots = min(curves, SLOTS)
    return "-" if slots == 1 else (-DASH * (slot % slots), (DASH, DASH * (slots - 1)))


def _draw_differences(axes: Axes, names: list[str], curves: list[StepCurve]) -> list[Line2D]:
    """Draw differences on a log axis; points where losses are equal to the last bit have a line of their own.

    Returns:
        A key for each curve, and one for that line if it is there.
    """
    every = [value for one in curves for value in one.whole]
    positive = [value for value in every if value > 0 and math.isfinite(value)]
    floor = 10.0 ** (math.floor(math.log10(min(positive, default=1e-16))) - 1)
    keys = []
    for index, one in enumerate(curves, start=1):
        axes.plot(
            one.steps,
            [floor if value == 0 else value for value in one.values],
            color=colour(index),
            linestyle=_alternating(index - 1, len(curves)),
            marker=marker(index) or "o",
            markevery=-(-len(one.steps) // MARKED),
            markersize=2 + 2.5 * (len(curves) - index) / (len(curves) + 1),  # where they coincide, rings
            linewidth=1.2,
        )
        key = Line2D([], [], color=colour(index), marker=marker(index) or "o", markersize=3.5)
        key.set_label(one.title)
        keys.append(key)
    if 0 in every:
        keys.append(axes.axhline(floor, color=INK, linewidth=1, linestyle=":", label="equal, bit for bit"))
    label = f"|loss - {names[0]}| / loss{_of_window(curves, 'largest')}"
    axes.set(xlabel="step", ylabel=label, yscale="log")
    return keys


def _of_window(curves: list[StepCurve], what: str) -> str:
    length = window_length(max((len(one.whole) for one in curves), default=0))
    return f", {what} of {length} steps" if length > 1 else ""
