"""The record of a training: which steps are written down, evaluated and saved, the same on both sides.

Both sides' loops tell a `Recording` how far they are; it asks its `RecordedSide` for what only that knows.
"""

import math
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, SupportsFloat

import numpy as np
from msgspec import UNSET

from compare.checkpoint.description import CHECKPOINTS, Checkpoint
from compare.checkpoint.saver import Part, Saver
from compare.contract.record import Manifest, Recorder, Step, write_tensors
from compare.contract.request import Request, Rung
from compare.contract.timing import Window
from compare.numerics.loss_scale import LossScale, next_scale
from compare.numerics.optimizer import learning_rate
from compare.numerics.parameters import parameter_count
from compare.numerics.stream import Evaluation, is_due
from compare.side.ending import STOP_SIGNAL, DivergedError, StoppedEarly
from compare.spec.experiment import Experiment


class FinishedStep(NamedTuple):
    """A step that has run: its place, and its numbers."""

    step: int
    loss_scale: LossScale | None
    loss: SupportsFloat
    """A scalar, perhaps still on the device; so is the norm."""
    grad_norm: SupportsFloat
    tokens_per_expert: Any = None
    """With experts an array (L, E), as `Step` has it."""

    def record(self, experiment: Experiment, *, seconds: float, **more: Any) -> Step:
        """Its line of the record, with `more` fields. A skipped step has a norm of 0."""
        norm = float(self.grad_norm)
        skipped = self.loss_scale is not None and not math.isfinite(norm)
        return Step(
            step=self.step,
            loss=float(self.loss),
            grad_norm=0.0 if skipped else norm,
            lr=learning_rate(experiment.optimizer, self.step),
            step_time_ms=seconds * 1e3,
            loss_scale=self.loss_scale.scale if self.loss_scale else UNSET,
            skipped=skipped,
            tokens_per_expert=UNSET if self.tokens_per_expert is None else self.tokens_per_expert.tolist(),
            **more,
        )


@dataclass(kw_only=True)
class Progress:
    """How far a training has come."""

    step: int = 0
    """The batch to come is `batch(step)`; the schedule follows it."""
    updates: int = 0
    """Of the weights so far, without skipped steps: what Adam's bias correction follows."""
    loss_scale: LossScale | None = None
    """Of the next step, in float16."""
    evaluation: Evaluation | None = None
    """Of the weights as they are."""

    def finished(
        self, loss: SupportsFloat, grad_norm: SupportsFloat, tokens_per_expert: Any = None
    ) -> FinishedStep:
        """The step from here; call it before `move_on`."""
        return FinishedStep(self.step, self.loss_scale, loss, grad_norm, tokens_per_expert)

    def move_on(self, engine: str, experiment: Experiment, *, grad_norm: float | None = None) -> bool:
        """After a step, whose norm is needed where there is a loss scale. Returns whether it was skipped.

        Raises DivergedError: gradients overflow at the smallest loss scale.
        """
        skipped = False
        if self.loss_scale is not None:
            assert grad_norm is not None
            skipped = not math.isfinite(grad_norm)
            try:
                self.loss_scale = next_scale(self.loss_scale, experiment.precision, overflowed=skipped)
            except OverflowError as error:
                raise DivergedError(f"{engine} diverged at step {self.step}: its {error}") from None
        self.step += 1
        self.evaluation = None
        self.updates += not skipped
        return skipped


class RecordedSide(Protocol):
    """One process of a run, as its side tells of it. All ranks call each method together."""

    request: Request
    devices: Collection[int]
    """Numbers of this process's."""
    corpus_sha256: str

    def memory(self) -> int: ...  # bytes in use now
    def not_finite(self) -> str: ...  # a clause about the first tensor that is not finite
    def tensors(self, rung: Rung) -> Mapping[str, np.ndarray]: ...  # as they are now, by canonical name
    def evaluate(self, step: int) -> Evaluation: ...  # the weights after so many steps
    def is_to_stop(self) -> bool: ...  # any process was asked to end early: the same on all, which meet here
    def parts(self) -> Iterable[Part]: ...  # what this process's devices hold now: weights and moments

    def costs(self, windows: Sequence[Window], recorder: Recorder | None) -> dict[str, Any]:
        """Leave what was found of a step, and return the manifest's fields that only the side knows.

        All ranks but the first have no recorder, write nothing and return {}. `windows` are this process's.
        """


class Observer:
    """Watches one step of a training, whose time then does not count."""

    watched: int
    """Number of the step."""

    def watch(self) -> AbstractContextManager:
        """Entered around the watched step."""
        return nullcontext()

    def gradients(self, step: int) -> None:
        """A step's mean gradients are there, before clipping."""


class Recording:
    """What a loop tells at each moment of a training, and what is written then.

    Checkpoints go into `folder`; all else is written by the recorder, which only the first rank has.
    """

    def __init__(
        self,
        side: RecordedSide,
        recorder: Recorder | None,
        folder: Path,
        observers: Sequence[Observer] = (),
    ):
        self._side, self._recorder, self._observers = side, recorder, observers
        self._request, self._experiment = side.request, side.request.experiment
        self._first_step_s, self._windows, self._saver = 0.0, list[Window](), None
        checkpoint, devices = self._experiment.checkpoint, self._experiment.layout.devices
        if checkpoint.every:
            self._saver = Saver(folder / CHECKPOINTS, side.devices, of=devices, keep=checkpoint.keep)

    def begin(self, progress: Progress) -> None:
        """Before the first step: leave the first batch and weights, and evaluate these."""
        if self._request.ladder:
            self._leave(Rung.BATCH, Rung.INITIAL_WEIGHTS)
        self._evaluate(progress)

    @contextmanager
    def around(self, step: int) -> Generator[None]:
        """Entered around a step that the host waits for."""
        with ExitStack() as stack:
            for observer in self._observers:
                if observer.watched == step:
                    stack.enter_context(observer.watch())
            yield

    def gradients(self, step: int) -> None:
        """In the middle of such a step: the mean gradients are there, before clipping."""
        due = self._request.update_due(step)[:1]
        if due == (Rung.GRADIENTS,) and self._experiment.model.n_experts:
            self._leave(Rung.ROUTING)
        self._leave(*due)
        for observer in self._observers:
            observer.gradients(step)

    def steps(self, done: Sequence[FinishedStep], window: Window) -> None:
        """Write a step, or the steps of a window, which cost so much; leave the tensors that are due.

        Raises DivergedError: a loss or a norm is not finite, on all ranks alike.
        """
        request, first, seconds = self._request, done[0].step, window.wall_s / window.steps
        if first == request.first_step:
            self._first_step_s = seconds
        if request.timing and request.timing.is_timed(first):
            self._windows.append(window)
        for finished in done:
            watched = any(observer.watched == finished.step for observer in self._observers)
            seen = {"memory_bytes": self._side.memory(), "instrumented": watched}
            line = finished.record(self._experiment, seconds=seconds, **seen)
            if self._recorder:
                self._recorder.step(line)
            values = {"loss": line.loss, "gradient norm": line.grad_norm}
            wrong = [f"its {name} is {value}" for name, value in values.items() if not math.isfinite(value)]
            if wrong:
                said = f"{request.engine} diverged at step {line.step}: {' and '.join(wrong)}"
                raise DivergedError(f"{said}; {self._side.not_finite()}")
        if rung := request.weights_due.get(done[-1].step + 1 - request.first_step):
            self._leave(rung)
        self._leave(*request.update_due(first)[1:])

    def between(self, progress: Progress) -> None:
        """Before the next step, and after the last: evaluate and save, where that is due.

        Raises:
            OSError: the checkpoint before could not be written.
            StoppedEarly: the run was asked to end here, and its checkpoint is complete.
        """
        self._evaluate(progress)
        step, last = progress.step, self._experiment.train.max_iters
        if not self._saver:
            return
        stops = step < last and self._side.is_to_stop()
        if not stops and step < last and step % self._experiment.checkpoint.every:
            return
        checkpoint = Checkpoint(
            engine=self._request.engine,
            experiment=self._experiment,
            step=step,
            updates=progress.updates,
            loss_scale=progress.loss_scale or UNSET,
            validation_loss=progress.evaluation.validation if progress.evaluation else UNSET,
            corpus_sha256=self._side.corpus_sha256,
        )
        self._saver.save(checkpoint, self._side.parts())
        if stops:
            self._saver.finish()
            self._side.is_to_stop()  # all have written, before any of them leaves
            asked = f"stopped after step {step} of {last}, as asked by {STOP_SIGNAL.name}"
            raise StoppedEarly(f"{asked}; its state is saved")

    def finish(self) -> None:
        """After the last step: wait for the last checkpoint, put the ranks' costs together, and complete."""
        if self._saver:
            self._saver.finish()
        costs, request = self._side.costs(self._windows, self._recorder), self._request
        if not self._recorder:
            return
        manifest = Manifest(
            engine=request.engine,
            experiment=request.experiment,
            platform=request.platform,
            devices=request.experiment.layout.devices,
            parameters=parameter_count(request.experiment.model),
            corpus_sha256=self._side.corpus_sha256,
            first_step_s=self._first_step_s,
            **costs,
        )
        self._recorder.finish(manifest)

    def _evaluate(self, progress: Progress) -> None:
        if self._experiment.train.eval_interval and is_due(self._experiment, progress.step):
            progress.evaluation = self._side.evaluate(progress.step)
            if self._recorder:
                self._recorder.evaluation(progress.evaluation)

    def _leave(self, *rungs: Rung) -> None:
        for rung in rungs:
            tensors = self._side.tensors(rung)
            if self._recorder:
                write_tensors(self._recorder.folder, rung, tensors)
