"""Progress on stderr: a bar in a terminal, a line now and then in a pipe, nothing where it is quiet."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from compare.contract.record import Step
from compare.contract.request import Request
from compare.execute.launch import EngineError
from compare.execute.pace import Cadence, Pace
from compare.numerics.data import TRAINING
from compare.spec.experiment import Experiment
from compare.terminal import coloured, human_bytes, messages_console

LOG_LINES = 20
BAR_WIDTH = 20
TICK_S = 1.0
LONG_TO_READ = 500_000_000
"""Bytes of data that are read for seconds."""


class Reporter:
    """Tells a person how far the engines are.

    Args:
        quiet: tell nothing.
    """

    def __init__(self, *, quiet: bool = False):
        self.console = messages_console(quiet=quiet)
        # Not console.is_terminal, which FORCE_COLOR makes true in a pipe as well.
        self._draws = not quiet and sys.stderr.isatty() and not self.console.is_dumb_terminal
        self._pace = Pace({}, Path(), (), time.monotonic())
        self._cadence = Cadence(time.monotonic())

    def reads(self, experiment: Experiment) -> None:
        """Say that the data is validated, if that takes a while: all of it is read and hashed, once."""
        source = Path(experiment.data.source)
        with contextlib.suppress(OSError, ValueError):  # what is no file is said by those who read it
            file = source / TRAINING if source.is_dir() else source
            if (size := file.stat().st_size) >= LONG_TO_READ:
                self._say(f"{file}: {human_bytes(size)} are read once, to validate and to hash them")

    def start(self, requests: Mapping[str, Request], folder: Path, finished: Collection[str] = ()) -> None:
        """Say what is to come.

        Args:
            requests: of all cases, by name, in the order in which they run.
            folder: of the comparison: each case has its own in it.
            finished: cases that need not run.
        """
        now = time.monotonic()
        self._pace, self._cadence = Pace(requests, folder, finished, now), Cadence(now)

    @contextmanager
    def engine(self, name: str) -> Generator[Callable[[Step], None]]:
        """Follow one case of those that `start` was given; yields what to call with each step."""
        pace = self._pace
        pace.begin(name, time.monotonic())
        try:
            with self._bar() if self._draws else self._lines():
                yield lambda step: pace.step(step, time.monotonic())
        finally:
            pace.end()
            self._say(pace.outcome(time.monotonic()))

    def failed(self, error: EngineError) -> None:
        """Say at once that a case did not finish, with the end of its log; others may still run."""
        if error.log and error.log.is_file():
            self._say("\n".join(error.log.read_text(errors="replace").splitlines()[-LOG_LINES:]))
            self._say(f"its whole log: {error.log}")
        self._say(f"{error}", style="red")

    @contextmanager
    def waits(self, what: str) -> Generator[None]:
        """Say what is waited for: a spinner in a terminal, a line in a pipe."""
        if self._draws:
            with self.console.status(what):
                yield
        else:
            self._say(what)
            yield

    def _say(self, text: str, *, style: str = "") -> None:
        with contextlib.suppress(OSError):  # stderr is full or gone: no reason to lose a run
            self.console.print(coloured(text, style), soft_wrap=True)

    def _bar(self) -> Live:
        spinner = Spinner("dots")
        return Live(
            get_renderable=lambda: _drawn(self._pace, spinner, time.monotonic()),
            console=self.console,
            refresh_per_second=8,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    @contextmanager
    def _lines(self) -> Generator[None]:
        """Say a line now and then, from a thread: an engine that compiles has no steps to tell of."""
        self._say(f"{self._pace.place()}: starting")
        self._cadence.begin(time.monotonic())
        over = threading.Event()

        def talk() -> None:
            while not over.wait(TICK_S):
                now = time.monotonic()
                if self._cadence.is_due(self._pace.done / self._pace.steps, now):
                    self._say(self._pace.line(now))

        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _drawn(pace: Pace, spinner: Spinner, now: float) -> Group:
    """Two lines of a terminal: which case, a bar and the step; and the figures."""
    bar = ProgressBar(
        total=pace.steps, completed=pace.done, width=BAR_WIDTH, pulse=pace.last is None, animation_time=now
    )
    row = Table.grid(padding=(0, 1))
    for _ in range(4):
        row.add_column(no_wrap=True, overflow="ellipsis")
    row.add_row(spinner, coloured(pace.place(), ""), bar, Text(pace.doing()))
    figures = Text(f"  {pace.figures(now)}", style="dim", no_wrap=True, overflow="ellipsis")
    return Group(row, figures)
