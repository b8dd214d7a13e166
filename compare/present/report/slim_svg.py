"""matplotlib's SVG without what a page does not need, and with the values that show under a pointer.

Hover values are SVG's own <title>: a browser shows them without a script, and paper ignores them. No library
of charts is inlined. The smallest that is well kept, uPlot, has 50 kB and draws on a canvas, so that a page
printed or read without JavaScript would need every chart twice; Chart.js has 200 kB, Plotly 4 MB.
"""

import itertools
import re
import statistics
from collections.abc import Sequence

from markupsafe import escape
from matplotlib.axes import Axes
from msgspec import Struct

FINE = 10
"""Coordinates below it have two digits after the point, others one: a tenth of a point."""
POINTS_PER_INCH = 72
_SHAPE = re.compile(r' d="([^"]*)"')
_LONG_NUMBER = re.compile(r"-?\d+\.\d{2,}(?:e-\d+)?")
_BOX = re.compile(r"M(\S+) (\S+)L(\S+) \2L\3 (\S+?)L\1 \4(?:L\1 \2)?z")
_IN_TAG = re.compile(r"<[^>]*>")
_NAMED = re.compile(r'<g id="value:([^"]*)">')
_GROUP = re.compile(r"(<g\b[^>]*>|</g>)")
_ALIKE = re.compile(r'<use [^>]*?( style="[^"]*")/>(?:<use [^>]*?\1/>)+')
_UNUSED = (
    (re.compile(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>|<!--.*?-->", re.DOTALL), ""),
    (re.compile(r' xmlns(?::xlink)?="[^"]*"| version="1.1"|\bxlink:(?=href)'), ""),  # HTML needs none
    (re.compile(r' transform="rotate\(-0 [^"]*\)"'), ""),
    (re.compile(r"font-family: [^;]*; "), ""),  # the page's style has it, and what a word has by default
    (re.compile(r'(?<=<text style=")font-size: 9px; '), ""),
    (re.compile(r"(<(?:text|tspan) [^>]*); fill: currentColor"), r"\1"),
    (
        re.compile(r'(<use [^>]*) style="fill: currentColor; stroke: currentColor; stroke-w[^"]*"'),
        r"\1",
    ),  # ticks
    (re.compile(r'<g id="(?!value:)[^"]*"'), "<g"),  # nothing refers to a group
    (re.compile(r">\s+<"), "><"),
)


class Readings(Struct, frozen=True):
    """Values that a figure of curves shows under a pointer."""

    x: Sequence[float]
    """Rising, in the units of the axis."""
    texts: Sequence[str]
    """One for each x."""


def value_of(text: str) -> str:
    """The gid of an artist, such as a bar, that shows `text` under a pointer."""
    return f"value:{text}"


def slim(svg: str) -> str:
    """The same drawing in fewer bytes, for a page whose style is report.css, which has the look of words.

    Numbers are short, styles shared, blanks and groups without a meaning gone, values are titles.
    """
    for pattern, instead in _UNUSED:
        svg = pattern.sub(instead, svg)
    svg = _ALIKE.sub(lambda uses: f"<g{uses[1]}>{uses[0].replace(uses[1], '')}</g>", _flat(svg))
    svg = _NAMED.sub(r"<g><title>\1</title>", svg)
    svg = _IN_TAG.sub(lambda tag: _LONG_NUMBER.sub(_short, tag[0]), svg)
    return _SHAPE.sub(lambda shape: f' d="{_tight(shape[1])}"', svg)


def strips(axes: Axes, readings: Readings) -> str:
    """An invisible strip over a drawn figure for each reading, as <path>s that have its text.

    Args:
        axes: of a figure that has been drawn: its layout is final.
        readings: in the units of their x axis.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    scale = POINTS_PER_INCH / figure.dpi
    height = figure.get_figheight() * POINTS_PER_INCH
    box = axes.get_window_extent()
    top, size = height - box.y1 * scale, box.height * scale
    places = [axes.transData.transform((x, axes.get_ylim()[0]))[0] * scale for x in readings.x]
    gaps = [right - left for left, right in itertools.pairwise(places)]
    width = statistics.median(gaps) if gaps else box.width * scale
    paths = (
        f'<path d="M{place:.1f} {top:.1f}v{size:.1f}"><title>{escape(text)}</title></path>'
        for place, text in zip(places, readings.texts, strict=True)
    )
    return f'<g class="values" stroke-width="{max(width, 1):.2f}">{"".join(paths)}</g>'


def _flat(svg: str) -> str:
    """The drawing without groups that have no attribute."""
    kept, is_bare = [], []
    for token in _GROUP.split(svg):
        if token.startswith("<g"):
            is_bare.append(token == "<g>")
        if not (token == "<g>" or (token == "</g>" and is_bare.pop())):
            kept.append(token)
    return "".join(kept)


def _short(number: re.Match[str]) -> str:
    value = float(number[0])
    text = f"{value:.{1 if abs(value) >= FINE else 2}f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _tight(shape: str) -> str:
    """A path's data without blanks around its letters; of an upright box its corners alone."""
    tight = re.sub(r"\s*([A-Za-z])\s*", r"\1", " ".join(shape.split()))
    return _BOX.sub(r"M\1 \2H\3V\4H\1z", tight)
