"""Observers of a training: they watch the loop and are no part of it. Both sides' loops tell them alike.

    begin       before the first step
    around      a context for a step that the host waits for
    gradients   in the middle of such a step: the mean gradients are there, before clipping
    steps       a step is done, or the several steps of a window
    between     before the next step, and after the last: evaluate, save
    finish      after the last step

Which steps are evaluated, saved and recorded is decided here, once. A side gives what only it knows: the
tensors of a rung, the losses of an evaluation, the parts of a checkpoint.
"""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple, SupportsFloat

import numpy as np

from compare.contract.divergence import end_if_diverged
from compare.contract.progress import Place, Progress
from compare.contract.record import Recorder
from compare.contract.request import MOMENTS, Request, Rung
from compare.contract.timing import Window
from compare.host.facts import MemoryUse
from compare.numerics.evaluation import Evaluation, is_due
from compare.numerics.optimizer import moment_names


class Done(NamedTuple):
    """A step that is done."""

    place: Place
    """Where it began."""
    loss: SupportsFloat
    """A scalar, perhaps still on the device; so is the norm."""
    grad_norm: SupportsFloat


class Observer:
    """Watches a training. Every method does nothing until it is overridden."""

    def begin(self, progress: Progress) -> None:
        """Before the first step; the state is where the run begins."""

    def around(self, step: int) -> AbstractContextManager:
        """Entered around a step."""
        return nullcontext()

    def gradients(self, step: int) -> None:
        """The step's mean gradients are there."""

    def steps(self, done: Sequence[Done], window: Window) -> None:
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

    def steps(self, done: Sequence[Done], window: Window) -> None:
        for one in self._observers:
            one.steps(done, window)

    def between(self, progress: Progress) -> None:
        for one in self._observers:
            one.between(progress)

    def finish(self) -> None:
        for one in self._observers:
            one.finish()


class Steps(Observer):
    """Writes steps.jsonl, and ends a run whose numbers are no longer finite.

    Args:
        request: what is run.
        recorder: writes; None on all ranks but the first.
        memory: in use now.
        where: a clause about the first tensor that is not finite; all ranks call it together.
        instrumented: steps that are watched, so that their time does not count.

    Attributes:
        first_step_s: wall time of the first step.
        windows: of a timed run, in order.
    """

    def __init__(
        self,
        request: Request,
        recorder: Recorder | None,
        *,
        memory: Callable[[], MemoryUse],
        where: Callable[[], str],
        instrumented: Collection[int] = (),
    ):
        self._request, self._recorder = request, recorder
        self._memory, self._where, self._instrumented = memory, where, instrumented
        self.first_step_s = 0.0
        self.windows: list[Window] = []

    def steps(self, done: Sequence[Done], window: Window) -> None:
        """Append a line each. Raises DivergedError: a loss or a norm is not finite, on all ranks alike."""
        timing, first = self._request.timing, done[0].place.step
        if first == self._request.first_step:
            self.first_step_s = window.wall_s / window.steps
        if timing and timing.is_in_window(first):
            self.windows.append(window)
        for one in done:
            self._append(one, seconds=window.wall_s / window.steps)

    def _append(self, done: Done, *, seconds: float) -> None:
        request = self._request
        line = done.place.record(
            request.experiment,
            loss=float(done.loss),
            grad_norm=float(done.grad_norm),
            seconds=seconds,
            memory=self._memory(),
            instrumented=done.place.step in self._instrumented,
        )
        if self._recorder:
            self._recorder.step(line)
        if not request.silent:
            end_if_diverged(request.engine, line, where=self._where)


class Ladder(Observer):
    """Leaves the tensors that the ladder compares.

    Args:
        request: what is run.
        recorder: writes; None on all ranks but the first.
        tensors: those of a rung as they are now, by canonical name; all ranks call it together.
    """

    def __init__(
        self, request: Request, recorder: Recorder | None, tensors: Callable[[Rung], Mapping[str, np.ndarray]]
    ):
        self._request, self._recorder, self._tensors = request, recorder, tensors

    def begin(self, progress: Progress) -> None:
        """The first batch, and the weights."""
        self._leave(Rung.BATCH)
        self._leave(Rung.INITIAL_WEIGHTS)

    def gradients(self, step: int) -> None:
        """The first step's."""
        if step == self._request.first_step:
            self._leave(Rung.GRADIENTS)

    def steps(self, done: Sequence[Done], window: Window) -> None:
        """Weights where they are due, and moments after the first step."""
        step = done[-1].place.step
        if rung := self._request.weights_due_after(step):
            self._leave(rung)
        if step == self._request.first_step:
            names = moment_names(self._request.experiment.optimizer)
            for rung in (rung for rung, name in MOMENTS.items() if name in names):
                self._leave(rung)

    def _leave(self, rung: Rung) -> None:
        tensors = self._tensors(rung)
        if self._recorder:
            self._recorder.tensors(rung, tensors)


class Evaluating(Observer):
    """Evaluates the weights where that is due, and writes evaluations.jsonl.

    Args:
        request: what is run.
        recorder: writes; None on all ranks but the first.
        evaluate: evaluates the weights after so many steps; all ranks call it together.
    """

    def __init__(self, request: Request, recorder: Recorder | None, evaluate: Callable[[int], Evaluation]):
        self._request, self._recorder, self._evaluate = request, recorder, evaluate

    def begin(self, progress: Progress) -> None:
        """The weights to begin with."""
        self.between(progress)

    def between(self, progress: Progress) -> None:
        """The weights as they are."""
        if is_due(self._request.experiment, progress.step):
            progress.evaluation = self._evaluate(progress.step)
            if self._recorder:
                self._recorder.evaluation(progress.evaluation)
