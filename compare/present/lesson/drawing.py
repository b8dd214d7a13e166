"""A drawing of boxes and words as SVG, in the ink of the page: what a diagram needs, in few bytes."""

from collections import defaultdict

from markupsafe import Markup, escape

SIZE = 11  # pixels, of text
INK, FAINT = "currentColor", "faint"


class Drawing:
    """Boxes and words at places in pixels, from the upper left corner; boxes of one colour are one path.

    Args:
        title: its name for those who cannot see it.
    """

    def __init__(self, title: str):
        self._title = title
        self._filled: dict[str, list[str]] = defaultdict(list)
        self._outlined: list[str] = []
        self._texts: list[str] = []
        self._width = self._height = 0.0

    def box(self, x: float, y: float, width: float, height: float, *, colour: str = "") -> None:
        """A box of a colour; without one an outline."""
        shape = f"M{x:.4g} {y:.4g}h{width:.4g}v{height:.4g}h{-width:.4g}z"
        (self._filled[colour] if colour else self._outlined).append(shape)
        self._grow(x + width, y + height)

    def text(self, x: float, y: float, words: str, *, anchor: str = "start", faint: bool = False) -> None:
        """Words on a line whose foot is at y; `anchor` is start, middle or end."""
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        look = ' class="faint"' if faint else ""
        self._texts.append(f'<text x="{x:.4g}" y="{y:.4g}"{place}{look}>{escape(words)}</text>')
        self._grow(x + (len(words) * 0.56 * SIZE if anchor == "start" else 0), y + 3)

    def svg(self) -> Markup:
        """The <svg> element, as large as what is in it."""
        name, width, height = escape(self._title), self._width + 2, self._height + 2
        fills = "".join(f'<path fill="{colour}" d="{"".join(ds)}"/>' for colour, ds in self._filled.items())
        outlines = f'<path class="outline" d="{"".join(self._outlined)}"/>'
        return Markup(
            f'<svg class="diagram" xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" '
            f'height="{height:.0f}" viewBox="-1 -1 {width:.0f} {height:.0f}" role="img" aria-label="{name}">'
            f"<title>{name}</title>{fills}{outlines}{''.join(self._texts)}</svg>"
        )

    def _grow(self, right: float, bottom: float) -> None:
        self._width, self._height = max(self._width, right), max(self._height, bottom)
