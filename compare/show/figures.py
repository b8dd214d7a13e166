"""Figures: what draws on matplotlib's axes, as SVG for a page and as a file of its own.

matplotlib takes a second to import: only `svg` and `save_figures` do so, and whoever draws is given the axes.
"""

import io
import math
import statistics
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup, escape
from msgspec import Struct

from compare.host.disk import write_atomically
from compare.judge.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas
    from matplotlib.figure import SubFigure

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
    draw: Callable[["Axes"], None]
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


def save_figures(path: Path, figures: Sequence[Figure], *, columns: int = 1) -> None:
    """Save figures as one file with a white ground, through a temporary name.

    Args:
        path: its suffix is the format: .png, .svg, .pdf.
        figures: at least one; several have their titles.
        columns: figures beside each other.
    """
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
    with matplotlib.rc_context():
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


def ticks(axes: "Axes", values: Mapping[float, str]) -> None:
    """Write so at these places of the x axis, and nothing between."""
    axes.set_xticks(list(values), list(values.values()))
    axes.minorticks_off()


def log_scale(axes: "Axes", *names: str) -> None:
    """Make axes logarithmic, with ticks that are written out."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for name in names:
        axes.set(**{f"{name}scale": "log"})
        axis = axes.xaxis if name == "x" else axes.yaxis
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


def curves(
    axes: "Axes",
    lines: Mapping[str, tuple[Sequence[int], Sequence[float]]],
    y: str,
    *,
    reduce: Callable[[Sequence[float]], float] = statistics.fmean,
) -> None:
    """Series over the steps of a run, the first the widest: so all show where they coincide.

    Args:
        axes: to draw on.
        lines: steps and values, by name; of long ones each window is one point.
        y: the axis, with its unit.
        reduce: makes one value of a window's.
    """
    from matplotlib.ticker import MaxNLocator

    for place, (name, (steps, values)) in enumerate(lines.items()):
        starts, reduced = windowed(values, reduce)
        lost = next((steps[i] for i, value in enumerate(values) if not math.isfinite(value)), None)
        axes.plot(
            [steps[start] for start in starts],
            reduced,
            color=colour(place),
            marker="o" if len(values) == 1 else "",
            linewidth=1.4 + 1.8 * (len(lines) - 1 - place),
            solid_capstyle="butt",
            label=name if lost is None else f"{name} (not finite from step {lost})",
        )
    length = window_length(max((len(values) for _, values in lines.values()), default=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="step" if length == 1 else f"step (a point for {length} steps)", ylabel=y)


def differences(axes: "Axes", lines: Mapping[str, tuple[Sequence[int], Sequence[float]]], y: str) -> None:
    """Differences over steps on a logarithmic axis; those that are 0 lie on a line of their own."""
    every = [value for _, values in lines.values() for value in values]
    least = min((value for value in every if 0 < value < math.inf), default=1e-16)
    floor = 10.0 ** (math.floor(math.log10(least)) - 1)
    raised = {name: (steps, [value or floor for value in values]) for name, (steps, values) in lines.items()}
    axes.set_yscale("log")
    curves(axes, {"": ([], []), **raised}, y, reduce=max)  # the first case's colour is not theirs
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


def bars(
    axes: "Axes",
    names: Sequence[str],
    lengths: Mapping[str, Sequence[float]],
    x: str,
    text: Callable[[float], str],
    *,
    is_stacked: bool = False,
) -> None:
    """Bars to the right of names, from above: a colour for each label, with the lengths written behind.

    Args:
        axes: to draw on.
        names: of rows.
        lengths: by label, one for each name; NaN for none. Those of a name stand below or, stacked, behind
            each other.
        x: the axis, with its unit.
        text: what is written behind a bar or a stack.
    """
    thick = 0.7 if is_stacked else 0.8 / len(lengths)
    begin, rows = [0.0] * len(names), range(len(names))
    for place, (label, sizes) in enumerate(lengths.items()):
        above = 0.0 if is_stacked else thick * (place - (len(lengths) - 1) / 2)
        axes.barh([row + above for row in rows], sizes, thick, begin, color=colour(place), label=label)
        if is_stacked:
            begin = [a + b for a, b in zip(begin, sizes, strict=True)]
        if not is_stacked or place == len(lengths) - 1:
            for row, end in enumerate(begin if is_stacked else sizes):
                if not math.isnan(end):
                    axes.text(end, row + above, f"  {text(end)}", va="center", fontsize="small")
    axes.margins(x=0.25)
    axes.set_xlim(left=0)
    _name_rows(axes, names, x)


def intervals(
    axes: "Axes", names: Sequence[str], estimates: Mapping[str, Sequence[Estimate | None]], x: str
) -> None:
    """A median with its interval behind each name, a colour for each label, and a line at 1."""
    axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
    for place, (label, of_label) in enumerate(estimates.items()):
        there = [(row, one) for row, one in enumerate(of_label) if one]
        above = 0.26 * (place - (len(estimates) - 1) / 2)
        axes.errorbar(
            [one.median for _, one in there],
            [row + above for row, _ in there],
            xerr=whiskers([one for _, one in there]),
            fmt=MARKERS[place],
            color=colour(place),
            capsize=3,
            markersize=5,
            label=label,
        )
    _name_rows(axes, names, x)


def whiskers(estimates: Iterable[Estimate]) -> list[list[float]]:
    """Lengths of intervals below and above their medians, as matplotlib takes them."""
    ends = [(one.median - one.ends[0], one.ends[1] - one.median) for one in estimates]
    return [[low for low, _ in ends], [high for _, high in ends]]


def rows_height(rows: int) -> float:
    """Inches that a figure of so many bars or intervals needs."""
    return 0.8 + 0.34 * rows


def _name_rows(axes: "Axes", names: Sequence[str], x: str) -> None:
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(x)


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


def gantt(axes: "Axes", rows: Sequence[str], boxes: Iterable[Box], x: str) -> None:
    """A row for each device, from above, and what it does over time.

    Args:
        axes: to draw on, of a wide figure.
        rows: their names.
        boxes: those of a look that nearly touch are drawn as one.
        x: the axis, with its unit.
    """
    groups: dict[tuple[int, str, str, bool, bool], list[Box]] = {}
    for box in boxes:
        groups.setdefault((box.row, box.label, box.text, box.is_pale, box.is_beside), []).append(box)
    end = max((box.begin + box.length for own in groups.values() for box in own), default=1.0)
    for (row, label, text, is_pale, is_beside), own in groups.items():
        spans: list[list[float]] = []
        for box in sorted(own, key=lambda box: box.begin):
            if spans and box.begin - spans[-1][1] < end * FINEST and not text:
                spans[-1][1] = max(spans[-1][1], box.begin + box.length)
            else:
                spans.append([box.begin, box.begin + box.length])
        widths = [(begin, max(stop - begin, end * FINEST)) for begin, stop in spans]
        place = (row + 0.66, 0.26) if is_beside else (row + 0.06, 0.56 if _has_beside(groups) else 0.88)
        alpha, edge = 0.55 if is_pale else 1.0, "white" if text else "none"
        axes.broken_barh(widths, place, facecolor=COLOURS[label], alpha=alpha, edgecolor=edge, label=label)
        for begin, width in widths if text else ():
            if width > end * 0.013:
                middle = (begin + width / 2, place[0] + place[1] / 2)
                axes.text(*middle, text, ha="center", va="center", color="black", fontsize=7)
    axes.set(xlim=(0, end), ylim=(len(rows), 0), xlabel=x)
    axes.set_yticks([row + 0.5 for row in range(len(rows))], rows)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _has_beside(groups: Iterable[tuple[int, str, str, bool, bool]]) -> bool:
    return any(is_beside for *_, is_beside in groups)


def areas(axes: "Axes", x: Sequence[float], heights: Mapping[str, Sequence[float]]) -> None:
    """Areas upon each other; labels are keys of `COLOURS`."""
    shades = [COLOURS[label] for label in heights]
    axes.stackplot(x, *heights.values(), labels=list(heights), colors=shades, linewidth=0)
