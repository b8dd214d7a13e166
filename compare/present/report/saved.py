"""A picture as a file of its own, with a white ground."""

import io
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from compare.host.disk import write_atomically
from compare.present.report.canvas import INK, STYLE, own_style

DARK, DPI = "#222222", 130


def save_figure(path: Path, draw: Callable[[Figure], None], *, size: tuple[float, float]) -> None:
    """Save what `draw` draws, through a temporary name.

    Args:
        path: of the picture; its suffix is its format: .png, .svg, .pdf.
        draw: on an empty figure, in the page's style.
        size: inches.
    """
    ink = {key: DARK if value == INK else value for key, value in STYLE.items()}
    ink |= {"figure.facecolor": "white", "svg.hashsalt": "shardpair"}
    with own_style(ink):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=path.suffix.lstrip("."), dpi=DPI)
    write_atomically(path, buffer.getvalue().replace(INK.encode(), DARK.encode()))
