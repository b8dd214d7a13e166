"""Progress on stderr: a bar in a terminal, one line per minute in a pipe, nothing if it is quiet."""

import contextlib
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from compare.contract.record import Step
from compare.contract.request import Request
from compare.execute.failures import read_log
from compare.execute.launch import EngineError
from compare.terminal import PlainConsole, coloured, printable
from compare.text import human_seconds

LOG_LINES = 20
LINE_S = 60.0  # between two lines in a pipe


class Pace:
    """The steps and the speed of a case; `place` is its name, with its number if there are several."""

    def __init__(self, place: str, request: Request):
        self.place, self.experiment = place, request.experiment
        self.begun = self.first = self.latest = time.monotonic()
        self.seen, self.last = 0, None

    def step(self, step: Step) -> None:
        self.latest = time.monotonic()
        self.first = self.first if self.seen else self.latest
        self.seen, self.last = self.seen + 1, step

    @property
    def done(self) -> int:
        """The number of steps so far."""
        return self.last.step + 1 if self.last else 0

    def figures(self) -> str:
        """Loss, tokens/s and time left, if they are known."""
        if not self.last:
            return "no step yet"
        figures = [f"loss {self.last.loss:.4f}"]
        if self.seen > 1:  # several steps may be read at once
            step_s = max((self.latest - self.first) / (self.seen - 1), self.last.step_time_ms / 1e3)
            figures.append(f"{self.experiment.tokens_per_step / step_s:,.0f} tokens/s")
            if left := self.experiment.train.max_iters - self.done:
                figures.append(f"about {human_seconds(left * step_s)} left")
        return ", ".join(figures)

    def __str__(self) -> str:
        return f"{self.place}: step {self.done} of {self.experiment.train.max_iters}, {self.figures()}"

    @property
    def outcome(self) -> str:
        steps, asked = f"{self.done} step{'s' * (self.done != 1)}", self.experiment.train.max_iters
        how = steps if self.done == asked else f"stopped after {steps} of {asked}"
        return f"{self.place}: {how} in {human_seconds(time.monotonic() - self.begun)}, {self.figures()}"


class Reporter:
    """Prints the progress of the engines, unless it is quiet."""

    def __init__(self, *, quiet: bool = False):
        self.console = PlainConsole(stderr=True, quiet=quiet)
        # FORCE_COLOR makes console.is_terminal true in a pipe, too.
        self._draws = not quiet and sys.stderr.isatty() and not self.console.is_dumb_terminal
        self._requests: Mapping[str, Request] = {}

    def start(self, requests: Mapping[str, Request]) -> None:
        """Set the requests of all cases by name, in the order in which they run."""
        self._requests = requests

    @contextmanager
    def engine(self, name: str) -> Generator[Callable[[Step], None]]:
        """Follow a case of `start`. Yields a function to call with each step."""
        number, count = list(self._requests).index(name) + 1, len(self._requests)
        case = Pace(f"{number} of {count}: {name}" if count > 1 else name, self._requests[name])
        try:
            with self._shown(f"{case.place}: starting", steps=case.experiment.train.max_iters) as show:

                def on_step(step: Step) -> None:
                    case.step(step)
                    show(f"{case}", case.done)

                yield on_step
        finally:
            self._print(case.outcome)

    @contextmanager
    def waits(self, message: str) -> Generator[Callable[[Step], None]]:
        """Print what the user waits for. Yields a function that ignores steps."""
        with self._shown(message):
            yield lambda step: None

    @contextmanager
    def _shown(self, text: str, *, steps: int | None = None) -> Generator[Callable[..., None]]:
        """Show a bar and a text, or print lines in a pipe. Yields a function of a new text and step."""
        if self._draws:
            columns = SpinnerColumn(), BarColumn(20), TextColumn("{task.description}", markup=False)
            with Progress(*columns, console=self.console, transient=True, redirect_stdout=False) as bar:
                task = bar.add_task(printable(text), total=steps)
                yield lambda text, done: bar.update(task, description=printable(text), completed=done)
            return
        printed = time.monotonic()
        self._print(text)

        def show(text: str, done: int) -> None:
            nonlocal printed
            if time.monotonic() - printed > LINE_S:
                printed = time.monotonic()
                self._print(text)

        yield show

    def note(self, text: str) -> None:
        """Print a line."""
        self._print(text)

    def failed(self, error: EngineError) -> None:
        """Print at once that a case did not finish, with the end of its log."""
        if error.log and error.log.is_file():
            self._print("\n".join(read_log(error.log).splitlines()[-LOG_LINES:]))
            self._print(f"the complete log: {error.log}")
        self._print(f"{error}", style="red")

    def _print(self, text: str, *, style: str = "") -> None:
        with contextlib.suppress(OSError):  # a closed stderr must not end a run
            self.console.print(coloured(text, style), soft_wrap=True)
