"""Memory over a step: an area for each class, stacked; a line where the peak is."""

import itertools
from collections.abc import Sequence

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from compare.contract.memory_profile import CLASSES, Class, Curve, Peak, PhaseStart
from compare.present.report.bars import KIND_COLOURS, scale
from compare.present.report.canvas import INK, WIDTH, legend_above, legend_height, svg
from compare.present.report.slim_svg import Readings
from compare.terminal import human_bytes

CLASS_COLOURS: dict[Class, str] = {
    "parameters": KIND_COLOURS["parameters"],
    "optimizer": KIND_COLOURS["optimizer"],
    "gradients": KIND_COLOURS["gradients"],
    "gathered parameters": "#1F88D1",
    "activations": "#CC79A7",
    "logits": "#D55E00",
    "communication buffers": "#8C6BB1",
    "XLA's temporaries": "#B8A25C",
    "temporaries": "#9A9A9A",
}
HEIGHT = 2.6  # inches without the legend
NARROWEST = 0.1
"""Of a step: what a phase takes whose name has room below it."""
POINTED_AT = 60
"""Points whose values can be read."""
MANY_PHASES = 12
"""Changes from which on a pipeline's forwards and backwards are too close to be named."""


def memory_over_step(name: str, curve: Curve, peak: Peak) -> Markup:
    """One device's memory over the watched step."""
    shown = [kind for kind in CLASSES if any(curve.bytes.get(kind, ()))]
    factor, unit = scale([peak.total])

    def draw(axes: Axes) -> None:
        tops = list(itertools.accumulate((curve.bytes[kind] for kind in shown), _summed))
        for kind, top in reversed(list(zip(shown, tops, strict=True))):  # each over what is higher
            places = corners(top)
            positions = [curve.positions[place] for place in places]
            heights = [top[place] / factor for place in places]
            axes.fill_between(positions, heights, color=CLASS_COLOURS[kind], linewidth=0)
        axes.axvline(peak.position, color=INK, linewidth=1, linestyle=":")
        axes.set(xlim=(0, max(curve.length - 1, 1)), ylim=(0, 1.12 * peak.total / factor))
        left = peak.position < curve.length / 2
        axes.annotate(
            f"{peak.total / factor:.3g} {unit}",
            (peak.position, 1.05 * peak.total / factor),
            xytext=(4 if left else -4, 0),
            textcoords="offset points",
            ha="left" if left else "right",
            va="center",
        )
        _draw_phases(axes, curve)
        axes.set(ylabel=f"in use ({unit})", xlabel="operation of the step, in order")
        legend_above(axes, [Patch(color=CLASS_COLOURS[kind], label=kind) for kind in shown])

    size = (WIDTH, HEIGHT + legend_height(len(shown)))
    title = f"Memory of {name} over a step, by class"
    return svg(title, draw, size=size, readings=_readings(curve, shown))


def corners(values: Sequence[int]) -> list[int]:
    """Places of a curve that it needs: its ends, and both sides of each change."""
    last = len(values) - 1
    return [
        place
        for place, value in enumerate(values)
        if place in (0, last) or value != values[place - 1] or value != values[place + 1]
    ]


def _summed(below: Sequence[int], own: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(below, own, strict=True)]


def _readings(curve: Curve, shown: Sequence[Class]) -> Readings:
    """At so many points as can be pointed at: all, and what each class has of it."""
    places = range(0, len(curve.positions), -(-len(curve.positions) // POINTED_AT))
    texts = []
    for place in places:
        held = {kind: curve.bytes[kind][place] for kind in shown if curve.bytes[kind][place]}
        parts = "".join(f"\n{human_bytes(size)} {kind}" for kind, size in reversed(held.items()))
        texts.append(f"{human_bytes(sum(held.values()))} at operation {curve.positions[place]}{parts}")
    return Readings([curve.positions[place] for place in places], texts)


def _draw_phases(axes: Axes, curve: Curve) -> None:
    """Name the phases below the axis, where there is room; else nothing: a pipeline goes to and fro."""
    if len(curve.marks) > MANY_PHASES:
        return
    ends = [mark.position for mark in curve.marks[1:]] + [curve.length]
    for mark in curve.marks[1:]:
        axes.axvline(mark.position, color=INK, linewidth=0.6, alpha=0.5)
    phases = zip(curve.marks, ends, strict=True)
    named = [(mark, end) for mark, end in phases if end - mark.position >= NARROWEST * curve.length]
    axes.set_xticks([_middle(mark, end) for mark, end in named], [mark.phase for mark, _ in named])
    axes.tick_params(axis="x", length=0)


def _middle(mark: PhaseStart, end: int) -> float:
    return (mark.position + end) / 2
