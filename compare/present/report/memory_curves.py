"""Memory over a step: an area for each class, stacked; a line where the peak is."""

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from compare.contract.memory_profile import CLASSES, Class, Curve, Peak, PhaseStart
from compare.present.report.bars import KIND_COLOURS, scale
from compare.present.report.canvas import INK, WIDTH, legend_above, legend_height, svg

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
MANY_PHASES = 12
"""Changes from which on a pipeline's forwards and backwards are too close to be named."""


def memory_over_step(name: str, curve: Curve, peak: Peak) -> Markup:
    """One device's memory over the watched step."""
    shown = [kind for kind in CLASSES if any(curve.bytes.get(kind, ()))]
    factor, unit = scale([peak.total])

    def draw(axes: Axes) -> None:
        heights = [[size / factor for size in curve.bytes[kind]] for kind in shown]
        axes.stackplot(curve.positions, heights, colors=[CLASS_COLOURS[kind] for kind in shown], linewidth=0)
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
    return svg(f"Memory of {name} over a step, by class", draw, size=size)


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
