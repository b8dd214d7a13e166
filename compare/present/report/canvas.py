"""Axes to draw on, and drawings as SVG for the page: its own ink, a name for those who cannot see them."""

import io
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compare.present.report.slim_svg import Readings, slim, strips

INK = "#010203"  # a colour nothing else has: replaced by the page's own text colour
OKABE_ITO = ("#1F88D1", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1")
"""As Okabe and Ito's, which the colour-blind tell apart, but for what a white or a black ground swallows."""
WIDTH = 5.0  # inches: what a phone shows without shrinking its text below what can be read
LEGEND_COLUMNS, LEGEND_ROW = 2, 0.17  # inches
MARKERS = ("", "o", "s", "^", "D", "v", "P", "X", "*")
"""Where there are more cases than colours: one for each round of them."""

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # each text names the whole list
    "font.size": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}


def colour(index: int) -> str:
    """The colour of a case: the same in every picture."""
    return OKABE_ITO[index % len(OKABE_ITO)]


def marker(index: int) -> str:
    """Marker that tells a case from the others of its colour; '' where there are none."""
    return MARKERS[index // len(OKABE_ITO) % len(MARKERS)]


@contextmanager
def own_style(style: Mapping[Any, Any] = STYLE) -> Generator[None]:
    """matplotlib's defaults and `style` over them: a user's matplotlibrc changes no page, and ends none."""
    with matplotlib.rc_context():
        defaults = {key: value for key, value in matplotlib.rcParamsDefault.items() if key != "backend"}
        matplotlib.rcParams.update(defaults | dict(style))
        yield


@contextmanager
def figure_for_page(size: tuple[float, float]) -> Generator[Figure]:
    """A figure of `size` inches in the page's style. It is not pyplot's: a notebook keeps its own."""
    with own_style():
        yield Figure(figsize=size, layout="constrained")


def svg(
    title: str,
    draw: Callable[[Axes], None],
    *,
    size: tuple[float, float],
    readings: Readings | None = None,
) -> Markup:
    """Draw on fresh axes of `size` inches; the <svg> element, named `title`, with values to point at."""
    with figure_for_page(size) as figure:
        draw(figure.add_subplot())
        return inline_svg(figure, title, readings)


def inline_svg(figure: Figure, title: str, readings: Readings | None = None) -> Markup:
    """The figure as an <svg> element that can stand in a page among others.

    It is an image with a name, has the page's text colour, and no id that another picture has, too. The
    same figure gives the same bytes.

    Args:
        figure: drawn.
        title: its name for those who cannot see it.
        readings: values that its first axes show under a pointer.
    """
    text = _svg_file(figure, salt=f"shardpair {title}")
    text = slim(text[text.index("<svg") :].replace(INK, "currentColor"))
    if readings:
        text = text.replace("</svg>", f"{strips(figure.axes[0], readings)}</svg>")
    opening, rest = text.split(">", 1)
    name = escape(title)
    return Markup(f'{opening} role="img" aria-label="{name}"><title>{name}</title>{rest}')


def _svg_file(figure: Figure, *, salt: str) -> str:
    """The figure as an SVG file's text; `salt` makes its ids those of no other figure."""
    buffer = io.StringIO()
    with matplotlib.rc_context(rc={"svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def legend_above(axes: Axes, keys: Sequence[Artist]) -> None:
    """A legend over the axes, where no data can be."""
    figure = axes.get_figure(root=True)
    if figure is not None:
        figure.legend(handles=keys, loc="outside upper left", ncols=LEGEND_COLUMNS, fontsize="small")


def legend_height(keys: int) -> float:
    """Inches that `legend_above` takes for so many keys."""
    return LEGEND_ROW * -(-keys // LEGEND_COLUMNS)
