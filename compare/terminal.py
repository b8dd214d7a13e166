"""Consoles that print text unchanged.

A path or an error may contain rich's markup, such as `runs/[/x]`. So these consoles have no markup; colour
comes from `style=` and from `coloured`.
"""

from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

PIPE_WIDTH = 160  # rich assumes 80 columns in a pipe, which cuts tables


class PlainConsole(Console):
    """A console that prints any text unchanged."""

    def __init__(self, **options: Any):
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """The text of every str that rich prints, cells of tables included."""
        return super().render_str(printable(text, keep="\n"), **options)


def results_console() -> PlainConsole:
    """Standard output, as wide as the terminal or as `PIPE_WIDTH`."""
    console = PlainConsole()
    return console if console.is_terminal else PlainConsole(width=PIPE_WIDTH)


def errors_console() -> PlainConsole:
    """Standard error, without line breaks."""
    return PlainConsole(stderr=True, soft_wrap=True)


def print_json(value: object) -> None:
    """Print one JSON value on standard output."""
    print(msgspec.json.encode(value).decode(), flush=True)


def coloured(text: str, style: str) -> Text:
    """Text in a colour."""
    return Text(printable(text, keep="\n"), style=style)


def printable(text: str, *, keep: str = "") -> str:
    """`text` with control characters and unencodable characters escaped: \\x1b, \\n, \\udce9."""
    return "".join(
        character
        if character.isprintable() or character in keep
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )
