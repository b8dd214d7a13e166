"""Figures: what draws on matplotlib's axes, as SVG for a page and as a file of its own.

matplotlib takes a second to import: only `svg` and `save_figures` do so, and whoever draws is given the axes.
"""

import io
import math
import statistics
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup, escape
from msgspec import Struct

from compare.system.disk import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas
    from matplotlib.figure import SubFigure
else:
    Axes = Any

INK, DARK = "#010203", "#222222"
"""A colour that nothing else has: a page puts its own text colour there, a file a dark one."""
PALETTE = ("#1F88D1", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1")
"""As Okabe and Ito's, which the colour-blind tell apart, but for what a white or a black ground swallows."""
COLOURS = {
    "forward": "#56B4E9",
    "backward": "#E69F00",
    "backward, input": "#F0C419",
    "backward, weights": "#009E73",
    "update": "#009E73",
    "communication": "#CC79A7",
    "parameters": "#56B4E9",
    "gradients": "#E69F00",
    "optimizer": "#009E73",
    "gathered parameters": "#1F88D1",
    "activations": "#CC79A7",
    "logits": "#D55E00",
    "communication buffers": "#8C6BB1",
    "XLA's temporaries": "#B8A25C",
    "temporaries": "#9A9A9A",
}
"""Of what has the same colour in every figure."""
MARKERS = "os^Dv"
NARROW, WIDE = 5.0, 10.0
"""Inches: half of a page, on which a phone shows text that can be read, and all of it."""
DPI = 130
WINDOWS = 150
"""Points of a curve; a longer one is reduced over windows."""
FINEST = 1 / 1000
"""Of a time axis: narrower boxes are drawn so wide, and those of a kind that are closer as one."""


class Figure(Struct, frozen=True, kw_only=True):
    """A figure: its heading, its caption, and what draws it."""

    title: str
    caption: str = ""
    draw: Callable[[Axes], None]
    width: float = NARROW
    """Inches; a legend adds to the height."""
    height: float = 2.8

    @property
    def is_wide(self) -> bool:
        """It takes a page's whole width."""
        return self.width > NARROW


def svg(figure: Figure) -> Markup:
    """The figure as an <svg> element for a page, in the page's ink, named for those who cannot see it."""
    with _canvas(f"shardpair {figure.title}") as canvas:
        canvas.set_size_inches(figure.width, figure.height + _drawn(canvas, figure))
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
    """Save figures as one file (.png, .svg, .pdf) with a white ground; several have their titles."""
    columns = 1 if any(figure.is_wide for figure in figures) else min(len(figures), 2)
    rows = [figures[first : first + columns] for first in range(0, len(figures), columns)]
    heights = [max(figure.height for figure in row) + 0.5 for row in rows]
    with _canvas("shardpair", **{"figure.facecolor": "white"}) as canvas:
        canvas.set_size_inches(columns * max(figure.width for figure in figures), sum(heights))
        parts = canvas.subfigures(len(rows), columns, squeeze=False, height_ratios=heights)
        for part, figure in zip(parts.flat, figures, strict=False):
            _drawn(part, figure)
            if len(figures) > 1:
                part.axes[0].set_title(figure.title, loc="left")
        buffer = io.BytesIO()
        canvas.savefig(buffer, format=path.suffix.lstrip("."), dpi=DPI)
    write_atomically(path, buffer.getvalue().replace(INK.encode(), DARK.encode()))


@contextmanager
def _canvas(salt: str, **style: Any) -> Generator["Canvas"]:
    """An empty canvas in our style: a user's matplotlibrc changes no page. `salt` makes its ids its own."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    ink = DARK if style else INK
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    ours: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        **dict.fromkeys(inked, ink),
        **style,
    }
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a name's character that no font has: it would reach the terminal
        matplotlib.rcParams.update(
            {key: value for key, value in matplotlib.rcParamsDefault.items() if key != "backend"} | ours
        )
        yield Canvas(layout="constrained")


def _drawn(canvas: "Canvas | SubFigure", figure: Figure) -> float:
    """Draw on one pair of axes, a legend above where there are several names. Returns its height, inches."""
    axes = canvas.subplots()
    figure.draw(axes)
    keys: dict[str, Any] = {}
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        keys.setdefault(label, handle)
    if len(keys) < 2:
        return 0.0
    columns = 2 if figure.width == NARROW else 4
    canvas.legend(keys.values(), keys.keys(), loc="outside upper left", ncols=columns, fontsize="small")
    return 0.18 * math.ceil(len(keys) / columns)


def colour(place: int) -> str:
    """The colour of a case: the same in every figure."""
    return PALETTE[place % len(PALETTE)]


def bare(axes: Axes, rows: Mapping[float, str]) -> None:
    """Leave of the axes only these names of rows."""
    axes.set_yticks(list(rows), list(rows.values()), fontsize="small")
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def curves(
    axes: Axes,
    lines: Mapping[str, Mapping[int, float]],
    y: str,
    *,
    reduce: Callable[[Sequence[float]], float] = statistics.fmean,
) -> None:
    """Series over the steps of a run, the first the widest: so all show where they coincide.

    Of long ones each window is a point, to which `reduce` brings its values.
    """
    from matplotlib.ticker import MaxNLocator

    for place, (name, line) in enumerate(lines.items()):
        steps, values = list(line), list(line.values())
        starts, reduced = windowed(values, reduce)
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
    """Differences over steps on a logarithmic axis; those that are 0 lie on a line of their own."""
    every = [value for line in lines.values() for value in line.values()]
    least = min((value for value in every if 0 < value < math.inf), default=1e-16)
    floor = 10.0 ** (math.floor(math.log10(least)) - 1)
    raised = {name: {step: value or floor for step, value in line.items()} for name, line in lines.items()}
    axes.set_yscale("log")
    curves(axes, {"": {}, **raised}, y, reduce=max)  # the first case's colour is not theirs
    for place, line in enumerate(axes.lines[1:]):
        line.set(linewidth=1.2, marker=MARKERS[place % len(MARKERS)], markersize=3.5)
    axes.lines[0].set_label("_")
    if 0 in every:
        axes.axhline(floor, color=INK, linewidth=1, linestyle=":", label="equal, bit for bit")
    largest = max((value for value in every if value < math.inf), default=0.0)
    axes.set_ylim(floor / 3, max(10 * floor, 3 * largest))


def window_length(steps: int) -> int:
    """Steps of a point of a curve."""
    return max(1, math.ceil(steps / WINDOWS))


def windowed(
    values: Sequence[float], reduce: Callable[[Sequence[float]], float]
) -> tuple[list[int], list[float]]:
    """The place of each window's first value, and what a window is reduced to."""
    length = window_length(len(values))
    starts = list(range(0, len(values), length))
    return starts, [reduce(values[start : start + length]) for start in starts]


class Box(NamedTuple):
    """What a device does for a while."""

    row: int
    begin: float
    length: float
    label: str
    """A key of `COLOURS`."""
    text: str = ""
    is_pale: bool = False
    """Of a rank's later stages."""
    is_beside: bool = False
    """On the lower third of the row: communication, which lies beside compute."""


def gantt(axes: Axes, rows: Sequence[str], boxes: Sequence[Box], x: str) -> None:
    """A row for each device, from above, and what it does over time; boxes that nearly touch become one."""
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
    for look, spans in spans_by_look.items():
        place = (look.row + 0.66, 0.26) if look.is_beside else (look.row + 0.06, height)
        alpha, edge = 0.55 if look.is_pale else 1.0, "white" if look.text else "none"
        shade = COLOURS[look.label]
        axes.broken_barh(spans, place, facecolor=shade, alpha=alpha, edgecolor=edge, label=look.label)
        for begin, width in spans if look.text else ():
            if width > end * 0.013:
                middle = (begin + width / 2, place[0] + place[1] / 2)
                axes.text(*middle, look.text, ha="center", va="center", color="black", fontsize=7)
    axes.set(xlim=(0, end), ylim=(len(rows), 0), xlabel=x)
    axes.set_yticks([row + 0.5 for row in range(len(rows))], rows)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
