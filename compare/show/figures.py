"""Figures of findings, drawn by matplotlib: for the page as SVG, and as a file of their own."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.figure import SubFigure
from matplotlib.ticker import LogLocator, NullFormatter

from compare.present.report.canvas import INK, WIDTH, colour, figure_for_page, inline_svg, legend_height
from compare.present.report.saved import save_figure
from compare.show.findings import Figure, Series

WIDE, HIGH = 8.0, 4.8  # inches: of a figure of two axes
SMALL = 3.6  # inches: the height of a small one
ROW, FRAME = 0.34, 0.8  # inches: of a named row, and of what is around them


def svg_of(figure: Figure) -> Markup:
    """The figure as an <svg> element for the page."""
    with figure_for_page(_size(figure)) as canvas:
        draw(canvas, figure)
        return inline_svg(canvas, figure.title)


def save_figures(path: Path, figures: Sequence[Figure], *, title: str) -> None:
    """Save figures below each other as one file.

    Args:
        path: its suffix is the format: .png, .svg, .pdf.
        figures: at least one.
        title: above a single one; of several each has its own.
    """
    beside = 2 if all(figure.is_small for figure in figures) else 1
    lines = [figures[first : first + beside] for first in range(0, len(figures), beside)]
    heights = [max(_size(figure)[1] for figure in line) for line in lines]

    def draw_all(canvas: Canvas) -> None:
        parts = canvas.subfigures(len(lines), beside, squeeze=False, height_ratios=heights)
        for part, figure in zip(parts.flat, figures, strict=False):
            draw(part, figure)
            name = figure.title if len(figures) > 1 else title
            part.axes[0].set_title(name, loc="left")

    save_figure(path, draw_all, size=(beside * max(_size(figure)[0] for figure in figures), sum(heights)))


def draw(canvas: Canvas | SubFigure, figure: Figure) -> None:
    """Draw on one pair of axes, with a legend above where there are several names."""
    axes = canvas.subplots()
    if figure.at is not None:
        line = axes.axvline if figure.names else axes.axhline
        line(figure.at, color=INK, linewidth=0.8, linestyle=":" if figure.names else "-")
    for series in figure.series:
        _LOOKS[series.look](axes, series, bool(figure.names))
    if any(series.look == "bars" for series in figure.series):
        axes.margins(x=0.25)  # room for the texts
        axes.set_xlim(left=0)
    axes.set(xlabel=figure.x, ylabel=figure.y)
    if figure.names:
        axes.set_yticks(range(len(figure.names)), list(figure.names), fontsize="small")
        axes.set_ylim(len(figure.names) - 0.5, -0.5)
    else:
        axes.grid(alpha=0.25, linewidth=0.6)
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        if axis.axis_name in figure.log:
            scale("log")
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
    if figure.y_form:
        axes.yaxis.set_major_formatter(figure.y_form)
        axes.set_ylim(bottom=0)
    if figure.ticks:
        axes.set_xticks(list(figure.ticks), list(figure.ticks.values()))
        axes.minorticks_off()
    _legend(canvas, axes)


def _legend(canvas: Canvas | SubFigure, axes: Axes) -> None:
    keys: dict[str, Artist] = {}
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        keys.setdefault(label, handle)
    if len(keys) > 1:
        canvas.legend(keys.values(), keys.keys(), loc="outside upper left", ncols=2, fontsize="small")


def _line(axes: Axes, series: Series, has_names: bool) -> None:
    axes.plot(
        series.x,
        series.y,
        color=_shade(series),
        label=series.label,
        linestyle=series.dash,
        marker=series.mark,
        linewidth=1.4,
        markersize=4,
    )


def _points(axes: Axes, series: Series, has_names: bool) -> None:
    axes.errorbar(
        series.x,
        series.y,
        fmt=series.mark or "o",
        color=_shade(series),
        capsize=3,
        markersize=5,
        label=series.label,
        **_whiskers(series, has_names),
    )


def _bars(axes: Axes, series: Series, has_names: bool) -> None:
    begin = list(series.begin) or [0.0] * len(series.x)
    colours = series.colour if isinstance(series.colour, Sequence) else [series.colour] * len(series.x)
    shades = [INK if one is None else colour(one) for one in colours]
    whiskers = _whiskers(series, has_names)
    if whiskers:
        whiskers["error_kw"] = {"ecolor": INK, "capsize": 3}
    bars: dict[str, Any] = {"left": begin, "height": series.thick, "color": shades, "label": series.label}
    axes.barh(series.y, series.x, **bars, **whiskers)
    ends = [high for _, high in series.spread] or [sum(one) for one in zip(begin, series.x, strict=True)]
    for end, place, text in zip(ends, series.y, series.texts, strict=False):
        axes.annotate(text, (end, place), xytext=(6, 0), textcoords="offset points", va="center")


def _upright(axes: Axes, series: Series, has_names: bool) -> None:
    axes.axvline(series.x[0], color=_shade(series), linestyle=series.dash, linewidth=1.4, label=series.label)


_LOOKS: dict[str, Callable[[Axes, Series, bool], None]] = {
    "line": _line,
    "points": _points,
    "bars": _bars,
    "upright": _upright,
}


def _shade(series: Series) -> str:
    return colour(series.colour) if isinstance(series.colour, int) else INK


def _whiskers(series: Series, has_names: bool) -> dict[str, Any]:
    """Lengths of whiskers below and above each point, as matplotlib takes them."""
    if not series.spread:
        return {}
    values = series.x if has_names else series.y
    ends = list(zip(values, series.spread, strict=True))
    lengths = [[value - low for value, (low, _) in ends], [high - value for value, (_, high) in ends]]
    return {"xerr" if has_names else "yerr": lengths}


def _size(figure: Figure) -> tuple[float, float]:
    """Inches."""
    if not figure.names:
        return (WIDTH, SMALL) if figure.is_small else (WIDE, HIGH)
    keys = len({series.label for series in figure.series})
    rows = max(round(0.8 / series.thick) for series in figure.series)  # of bars beside each other
    return WIDTH, FRAME + ROW * rows * len(figure.names) + legend_height(keys if keys > 1 else 0)
