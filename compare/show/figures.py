"""Figures, as SVG for a page or as a file.

Only `svg` and `save_figures` import matplotlib, which takes a second. Functions that draw get its axes.
"""

import io
import math
import statistics
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from markupsafe import Markup, escape
from msgspec import Struct

from compare.system.disk import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas
    from matplotlib.figure import SubFigure
else:
    Axes = Any

Range = tuple[float, float]
"""Begin and end along one side, as fractions."""
WHOLE: Range = (0.0, 1.0)
INK, DARK = "#010203", "#222222"
"""Ink, a colour that is used nowhere else. A page replaces it by its text colour, a file by `DARK`."""
PALETTE = ("#1F88D1", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1")
"""Okabe and Ito's palette for the colour-blind, with other colours where it is too pale or too dark."""
COLOURS = {
    "forward": "#56B4E9",
    "backward": "#E69F00",
    "backward, input": "#F0C419",
    "backward, weights": "#009E73",
    "update": "#009E73",
    "communication": "#CC79A7",
    "parameters": "#56B4E9",
    "optimizer": "#009E73",
    "gradients": "#E69F00",
    "gathered parameters": "#1F88D1",
    "activations": "#CC79A7",
    "logits": "#D55E00",
    "communication buffers": "#8C6BB1",
    "XLA's temporaries": "#B8A25C",
    "temporaries": "#9A9A9A",
    "all_gather": "#56B4E9",
    "reduce_scatter": "#F0C419",
    "all_reduce": "#E69F00",
    "all_to_all": "#CC79A7",
    "permute": "#3FBF94",
    "broadcast": "#B8A25C",
}
"""Label -> its colour in every figure, in the order of every legend."""
LONGEST_KEY = 26
"""Largest number of characters of a legend's text if two fit into a line."""
FEW = 25
"""Largest number of steps whose differences are marked."""
NARROW, WIDE = 5.0, 10.0
"""Widths in inches: half a page, readable on a phone, and a whole page."""
DPI = 130
WINDOWS = 150
"""Largest number of points of a curve. Longer curves are reduced over windows."""
FINEST = 1 / 1000
"""Smallest width of a box, as a share of the time axis. Boxes of a kind that are closer are joined."""


class Figure(Struct, frozen=True, kw_only=True):
    """A figure with its heading, caption and drawing function."""

    title: str
    caption: str = ""
    draw: Callable[[Axes], None]
    width: float = NARROW
    """Width in inches. A legend adds to the height."""
    height: float = 2.8

    @property
    def is_wide(self) -> bool:
        """Whether it takes a page's whole width."""
        return self.width > NARROW

    def save(self, path: str | Path) -> None:
        """Save the figure in a file (.png, .svg, .pdf) on white."""
        save_figures(Path(path), [self])

    def _repr_html_(self) -> str:
        """The figure as <svg>, for a notebook."""
        return svg(self)


def svg(figure: Figure) -> Markup:
    """The figure as an <svg> element for a page, in the page's ink, with its title for screen readers."""
    with _canvas(f"shardpair {figure.title}") as canvas:
        canvas.set_size_inches(figure.width, figure.height + _draw(canvas, figure))
        buffer = io.StringIO()
        canvas.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue().replace(INK, "currentColor")
    # Groups have the same ids in each figure: nothing refers to them.
    opening, *rest = text[text.index("<svg") :].split('<g id="')
    body = opening + "".join("<g" + part[part.index('"') + 1 :] for part in rest)
    attributes, body = body.split(">", 1)
    name = escape(figure.title)
    return Markup(f'{attributes} role="img" aria-label="{name}"><title>{name}</title>{body}')


def save_figures(path: Path, figures: Sequence[Figure]) -> None:
    """Save figures in one file (.png, .svg, .pdf) on white. Several figures have titles."""
    columns = 1 if any(figure.is_wide for figure in figures) else min(len(figures), 2)
    rows = [figures[first : first + columns] for first in range(0, len(figures), columns)]
    heights = [max(figure.height for figure in row) + 0.5 for row in rows]
    with _canvas("shardpair", on_white=True) as canvas:
        canvas.set_size_inches(columns * max(figure.width for figure in figures), sum(heights))
        parts = canvas.subfigures(len(rows), columns, squeeze=False, height_ratios=heights)
        for part, figure in zip(parts.flat, figures, strict=False):
            _draw(part, figure)
            if len(figures) > 1:
                part.axes[0].set_title(figure.title, loc="left")
        buffer = io.BytesIO()
        canvas.savefig(buffer, format=path.suffix.lstrip("."), dpi=DPI)
    write_atomically(path, buffer.getvalue().replace(INK.encode(), DARK.encode()))


@contextmanager
def _canvas(salt: str, *, on_white: bool = False) -> Generator["Canvas"]:
    """An empty canvas in our style, independent of the user's matplotlibrc. `salt` makes its ids unique."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    ours: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9,
        "figure.facecolor": "white" if on_white else "none",
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        **dict.fromkeys(inked, DARK if on_white else INK),
    }
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a name's character that no font has: it would reach the terminal
        matplotlib.rcParams.update(
            {key: value for key, value in matplotlib.rcParamsDefault.items() if key != "backend"} | ours
        )
        yield Canvas(layout="constrained")


def _draw(canvas: "Canvas | SubFigure", figure: Figure) -> float:
    """Draw on one pair of axes, with a legend for several names. Returns the legend's height in inches."""
    axes = canvas.subplots()
    figure.draw(axes)
    handles: dict[str, Any] = {}
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        handles.setdefault(label, handle)
    keys = {label: handles[label] for label in dict.fromkeys([*COLOURS, *handles]) if label in handles}
    if len(keys) < 2:
        return 0.0
    columns = 4 if figure.is_wide else 2 if max(map(len, keys)) <= LONGEST_KEY else 1
    canvas.legend(keys.values(), keys.keys(), loc="outside upper left", ncols=columns, fontsize="small")
    return 0.18 * math.ceil(len(keys) / columns)


def colour(place: int) -> str:
    """The colour of a case in every figure."""
    return PALETTE[place % len(PALETTE)]


def strip_axes(axes: Axes, rows: Mapping[float, str]) -> None:
    """Remove ticks and spines of the axes, and name the rows."""
    axes.set_yticks(list(rows), list(rows.values()), fontsize="small")
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def tile(
    axes: Axes, x: float, y: float, width: float, height: float, parts: Sequence[tuple[Range, Range, str]]
) -> None:
    """Draw the outline of a box, and its filled parts: ranges of rows and of columns, and a colour."""
    for (top, bottom), (left, right), shade in parts:
        across, down = (x + left * width, (right - left) * width), (y + top * height, (bottom - top) * height)
        axes.broken_barh([across], down, facecolor=shade)
    axes.broken_barh([(x, width)], (y, height), facecolor="none", edgecolor=INK, linewidth=0.5)


def curves(
    axes: Axes,
    lines: Mapping[str, Mapping[int, float]],
    y: str,
    *,
    reduce: Callable[[Sequence[float]], float] = statistics.fmean,
) -> None:
    """Draw series over the steps of a run, the first the widest, so that coinciding series stay visible.

    A point of a long series is a window, whose values `reduce` combines.
    """
    from matplotlib.ticker import MaxNLocator

    for place, (name, line) in enumerate(lines.items()):
        steps, values = list(line), list(line.values())
        starts, reduced = reduce_windows(values, reduce)
        lost = next((step for step, value in line.items() if not math.isfinite(value)), None)
        axes.plot(
            [steps[start] for start in starts],
            reduced,
            color=colour(place),
            marker="o" if len(line) == 1 else "",
            linewidth=1.4 + 1.8 * (len(lines) - 1 - place),
            solid_capstyle="butt",
            label=name if lost is None else f"{name} (not finite from step {lost})",
        )
    length = window_length(max(map(len, lines.values()), default=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set(xlabel="step" if length == 1 else f"step (a point for {length} steps)", ylabel=y)


def differences(axes: Axes, lines: Mapping[str, Mapping[int, float]], y: str) -> None:
    """Draw differences from the first case on a logarithmic axis: equal ones once, zeros without a point."""
    names_by_line: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for name, line in lines.items():
        names_by_line.setdefault(tuple(line.items()), []).append(name)
    named = {", ".join(names): dict(line) for line, names in names_by_line.items()}
    axes.set_yscale("log")
    curves(axes, named, y, reduce=max)
    for curve, names, line in zip(axes.lines, names_by_line.values(), named.values(), strict=True):
        steps, values = map(np.asarray, curve.get_data())
        curve.set_data(steps[values != 0], values[values != 0])
        curve.set(linewidth=1.2, marker="o" if len(line) <= FEW else "", markersize=3.5)
        curve.set_color(colour(1 + [*lines].index(names[0])))
        if not any(line.values()):
            curve.set_label(f"{curve.get_label()} (no difference)")
    sizes = [value for line in lines.values() for value in line.values() if 0 < value < math.inf] or [1e-16]
    axes.set_ylim(min(sizes) / 2, max(20 * min(sizes), 2 * max(sizes)))


def window_length(steps: int) -> int:
    """Number of steps in a point of a curve."""
    return max(1, math.ceil(steps / WINDOWS))


def reduce_windows(
    values: Sequence[float], reduce: Callable[[Sequence[float]], float]
) -> tuple[list[int], list[float]]:
    """The index of each window's first value, and its reduced value."""
    length = window_length(len(values))
    starts = list(range(0, len(values), length))
    return starts, [reduce(values[start : start + length]) for start in starts]


class Box(NamedTuple):
    """An operation of a device in a Gantt chart."""

    row: int
    begin: float
    length: float
    label: str
    """A key of `COLOURS`."""
    text: str = ""
    is_pale: bool = False
    """Whether it is drawn pale, as a rank's later stages are."""
    is_beside: bool = False
    """Whether it is drawn in the lower third of the row, as communication is."""


def gantt(axes: Axes, rows: Sequence[str], boxes: Sequence[Box], x: str) -> None:
    """Draw a row for each device, from the top, with its boxes over time; join boxes that nearly touch.

    The legend has the order and the full colours of `COLOURS`.
    """
    end = max((box.begin + box.length for box in boxes), default=1.0)
    height = 0.56 if any(box.is_beside for box in boxes) else 0.88
    spans_by_look: dict[Box, list[tuple[float, float]]] = {}
    for box in sorted(boxes, key=lambda box: box.begin):
        spans = spans_by_look.setdefault(box._replace(begin=0, length=0), [])
        begin, stop = box.begin, box.begin + max(box.length, end * FINEST)
        if spans and not box.text and begin <= sum(spans[-1]) + end * FINEST:
            before = spans.pop()
            begin, stop = before[0], max(sum(before), stop)
        spans.append((begin, stop - begin))
    labels = list(COLOURS)
    for look in sorted(spans_by_look, key=lambda look: (look.is_pale, labels.index(look.label))):
        spans = spans_by_look[look]
        place = (look.row + 0.66, 0.26) if look.is_beside else (look.row + 0.06, height)
        alpha, edge = 0.55 if look.is_pale else 1.0, "white" if look.text else "none"
        shade = COLOURS[look.label]
        axes.broken_barh(spans, place, facecolor=shade, alpha=alpha, edgecolor=edge, label=look.label)
        for begin, width in spans if look.text else ():
            if width > end * 0.013:
                middle = (begin + width / 2, place[0] + place[1] / 2)
                axes.text(*middle, look.text, ha="center", va="center", color="black", fontsize=8)
    axes.set(xlim=(0, end), ylim=(len(rows), 0), xlabel=x)
    axes.set_yticks([row + 0.5 for row in range(len(rows))], rows)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
