"""Progress of work that is counted: a bar in a terminal, a line for each part in a pipe, nothing if quiet."""

import contextlib
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from compare.terminal import messages_console

LOOK_S = 0.5


class Tally:
    """Tells a person how much of some work is done, and how long the rest takes.

    Args:
        total: of all parts together.
        noun: what is counted, in the plural.
        quiet: tell nothing.
    """

    def __init__(self, total: int, noun: str, *, quiet: bool = False):
        self._total, self._noun, self._done = total, noun, 0
        self._console = messages_console(quiet=quiet)
        draws = not quiet and sys.stderr.isatty() and not self._console.is_dumb_terminal
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn(noun, markup=False),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not draws,
        )
        self._task = self._bar.add_task("", total=total)

    @contextmanager
    def part(self, name: str, count: Callable[[], int]) -> Generator[None]:
        """Follow one part while it is done elsewhere.

        Args:
            name: of the part.
            count: how much of it is done by now; called from a thread.
        """
        if self._bar.disable:
            self.say(f"{name}: {self._done} of {self._total} {self._noun} done")
        over = threading.Event()

        def look() -> None:
            while not over.wait(LOOK_S):
                self._bar.update(self._task, completed=self._done + count(), description=name)

        thread = threading.Thread(target=look, daemon=True)
        with self._bar:
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()
        self._done += count()

    def say(self, text: str, *, style: str = "") -> None:
        """A line for people."""
        with contextlib.suppress(OSError):  # stderr is full or gone: no reason to lose the work
            self._console.print(text, style=style or None, soft_wrap=True)
