"""Progress on stderr: a bar in a terminal, one line per finished engine in a pipe."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from compare.console import messages_console
from compare.contract.record import Step
from compare.launch import EngineError

LOG_LINES = 20


class Reporter:
    """Tells a person how far the engines are. Silent where `quiet`."""

    def __init__(self, *, quiet: bool = False):
        self.console = messages_console(quiet=quiet)

    @contextmanager
    def engine(self, name: str, steps: int) -> Generator[Callable[[Step], None]]:
        """Follow one engine through `steps` steps; yields what to call with each step."""
        started = time.monotonic()
        if self.console.is_terminal and not self.console.quiet:
            with self._bar() as bar:
                task = bar.add_task(f"{name}: starting", total=steps)

                def advance(step: Step) -> None:
                    bar.update(task, completed=step.step + 1, description=f"{name}: loss {step.loss:.4f}")

                yield advance
        else:
            yield lambda step: None
        self.console.print(f"{name}: {steps} steps, {time.monotonic() - started:.1f} s with start-up")

    def failed(self, error: EngineError) -> None:
        """Say at once that a case did not finish, with the end of its log; others may still run."""
        if error.log and error.log.is_file():
            tail = error.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            self.console.print("\n".join(tail))
            self.console.print(f"its whole log: {error.log}", soft_wrap=True)
        self.console.print(f"{error}", style="red", soft_wrap=True)

    def _bar(self) -> Progress:
        return Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
        )
