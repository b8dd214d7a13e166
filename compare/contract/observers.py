"""Observers of a training: they watch the loop and are no part of it. Both sides' loops tell them alike.

begin       before the first step
around      a context for a step that the host waits for
gradients   in the middle of such a step: the mean gradients are there, before clipping
steps       a step is done, or the several steps of a window
between     before the next step, and after the last: evaluate, save
finish      after the last step
"""

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple, SupportsFloat

from compare.contract.progress import Progress, ProgressSnapshot
from compare.contract.timing import Window


class FinishedStep(NamedTuple):
    """A step that has run, and its numbers."""

    start: ProgressSnapshot
    """Progress when it began."""
    loss: SupportsFloat
    """A scalar, perhaps still on the device; so is the norm."""
    grad_norm: SupportsFloat


class Observer:
    """Watches a training. Every method does nothing until it is overridden.

    Attributes:
        watched: the one step around which it does something, so that the step's time does not count; -1 for
            none.
    """

    watched = -1

    def begin(self, progress: Progress) -> None:
        """Before the first step; the state is where the run begins."""

    def around(self, step: int) -> AbstractContextManager:
        """Entered around a step."""
        return self.watch() if step == self.watched else nullcontext()

    def watch(self) -> AbstractContextManager:
        """Entered around the watched step."""
        return nullcontext()

    def gradients(self, step: int) -> None:
        """The step's mean gradients are there."""

    def steps(self, done: Sequence[FinishedStep], window: Window) -> None:
        """A step is done, or several that were timed together; `window` is what they cost.

        Raises:
            DivergedError: training ends here.
        """

    def between(self, progress: Progress) -> None:
        """The state has moved on, and the next step may begin when this returns."""

    def finish(self) -> None:
        """After the last step."""


class Observers(Observer):
    """Several observers as one, told in their order."""

    def __init__(self, observers: Sequence[Observer]):
        self._observers = observers

    def begin(self, progress: Progress) -> None:
        for one in self._observers:
            one.begin(progress)

    @contextmanager
    def around(self, step: int) -> Generator[None]:
        with ExitStack() as stack:
            for one in self._observers:
                stack.enter_context(one.around(step))
            yield

    def gradients(self, step: int) -> None:
        for one in self._observers:
            one.gradients(step)

    def steps(self, done: Sequence[FinishedStep], window: Window) -> None:
        for one in self._observers:
            one.steps(done, window)

    def between(self, progress: Progress) -> None:
        for one in self._observers:
            one.between(progress)

    def finish(self) -> None:
        for one in self._observers:
            one.finish()
