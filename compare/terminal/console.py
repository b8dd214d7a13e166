"""Consoles for results and messages: they print text as it is, never as markup.

A path or an engine's last words may hold what rich takes for markup: `runs/[/x]` ended a run that had
trained. So no console of ours knows markup; colour comes from `style=` and from `coloured`.
"""

import json
import sys
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from compare.terminal import standard_output

PIPE_WIDTH = 160  # a table in a log should not be cut to the 80 columns that rich assumes there


class PlainConsole(Console):
    """A console that prints any text as it is, and goes on when its reader has left."""

    def __init__(self, **options: Any):
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Called by rich for every str that it prints, in cells of tables too."""
        return super().render_str(printable(text, keep="\n"), **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich does, but what cannot be written is said by name, and messages end no run: no reader would
        hear why."""
        try:
            super().print(*objects, **options)
        except OSError as error:
            if not self.stderr:
                raise OSError(error.errno, error.strerror, standard_output.NAME) from None

    def on_broken_pipe(self) -> None:
        """`shardpair ... | head`: the command still finishes its work, and its exit code still tells."""
        self.quiet = True
        standard_output.discard(self.file)


def results_console() -> PlainConsole:
    """Standard output: as wide as the terminal, or wide enough for any table in a pipe."""
    console = PlainConsole()
    return console if console.is_terminal else PlainConsole(width=PIPE_WIDTH)


def messages_console(*, quiet: bool = False) -> PlainConsole:
    """Standard error, for progress."""
    return PlainConsole(stderr=True, quiet=quiet)


def errors_console() -> PlainConsole:
    """Standard error, for lines that are not cut."""
    return PlainConsole(stderr=True, soft_wrap=True)


def print_json(value: object) -> None:
    """One JSON value on standard output, for machines; escaped where its encoding has not the characters."""
    text = msgspec.json.encode(value).decode()
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = "".join(
            character if character.isascii() else json.dumps(character)[1:-1] for character in text
        )
    try:
        print(text, flush=True)
    except BrokenPipeError:
        standard_output.discard()
    except OSError as error:
        raise OSError(error.errno, error.strerror, standard_output.NAME) from None


def coloured(text: str, style: str) -> Text:
    """Text for a cell or a line, in a colour."""
    return Text(printable(text, keep="\n"), style=style)


def printable(text: str, *, keep: str = "") -> str:
    """`text` with what a terminal would obey, or an encoding refuse, spelled out: \\x1b, \\n, \\udce9."""
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in keep
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )
