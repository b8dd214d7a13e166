"""The record of a training: which steps are written, evaluated and saved. Both sides share it.

The loop of a side calls the methods of a `Recording`, which gets tensors and numbers from a `RecordedSide`.
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
from compare.numerics.context import order_of_positions
from compare.numerics.loss_scale import LossScale, next_scale
from compare.numerics.optimizer import learning_rate
from compare.numerics.parameters import parameter_count
from compare.numerics.stream import Evaluation, is_due
from compare.side.ending import STOP_SIGNAL, DivergedError, StoppedEarly
from compare.side.process_states import name_of_device, read_states
from compare.spec.experiment import Experiment

PATIENCE = 0.8
"""Share of the time-out after which a process names another that writes no checkpoint."""


class FinishedStep(NamedTuple):
    """The numbers of a finished step."""

    step: int
    loss_scale: LossScale | None
    loss: SupportsFloat
    """A scalar, perhaps still on the device, like `grad_norm`."""
    grad_norm: SupportsFloat
    tokens_per_expert: Any = None
    """An array (L, E), if the model has experts."""

    def record(self, experiment: Experiment, *, seconds: float, **more: Any) -> Step:
        """The step's line of the record, with the fields `more`. A skipped step has a norm of 0."""
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
    """The position of a training."""

    step: int = 0
    """The next step: its batch and its learning rate follow from the number."""
    updates: int = 0
    """Updates of the weights so far, without skipped steps; Adam's bias correction follows from it."""
    loss_scale: LossScale | None = None
    """The loss scale of the next step, in float16."""
    evaluation: Evaluation | None = None
    """The evaluation of the current weights, if it was due."""

    def finish_step(
        self, loss: SupportsFloat, grad_norm: SupportsFloat, tokens_per_expert: Any = None
    ) -> FinishedStep:
        """The current step with its numbers. Call it before `advance`."""
        return FinishedStep(self.step, self.loss_scale, loss, grad_norm, tokens_per_expert)

    def advance(self, engine: str, experiment: Experiment, *, grad_norm: float | None = None) -> bool:
        """Go to the next step; a loss scale needs the norm. Returns True if the step was skipped.

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
    """One process of a run, for its record. All ranks call each method together."""

    request: Request
    devices: Collection[int]
    """Numbers of this process's devices."""
    corpus_sha256: str
    initial_weights_sha256: str
    """`fingerprint` of the weights with which the run began, on the first rank."""

    def memory(self) -> int:
        """Bytes in use now."""
        ...

    def describe_non_finite(self) -> str:
        """A clause about the first tensor that is not finite."""
        ...

    def tensors(self, rung: Rung) -> Mapping[str, np.ndarray]:
        """Current tensors of a rung, by canonical name. Positions are in the order of the devices."""
        ...

    def evaluate(self, step: int) -> Evaluation:
        """The losses of the weights after `step` steps."""
        ...

    def should_stop(self) -> bool:
        """True on all processes if any was asked to stop. All processes wait for each other here."""
        ...

    def checkpoint_parts(self) -> Iterable[Part]:
        """Weights and moments of this process's devices."""
        ...

    def manifest_fields(self, windows: Sequence[Window], recorder: Recorder | None) -> dict[str, Any]:
        """Write the findings of a step, and return the manifest's fields that only the side can measure.

        Only the first rank has a recorder; the other ranks return {}. `windows` are of this process.
        """
        ...


POSITION_DIMS = {Rung.BATCH: 2, Rung.ROUTING: 3}
"""The dim of positions: T of tokens (A, B, T), and of experts (L, A, B, T, k)."""


class Observer:
    """Observes one step of a training, whose time then does not count."""

    watched: int
    """The number of the observed step."""

    def watch(self) -> AbstractContextManager:
        """A context around the observed step."""
        return nullcontext()

    def gradients(self, step: int) -> None:
        """Called when the mean gradients of a step are complete, before clipping."""


class Recording:
    """Writes the record of a training, as the loop goes on.

    Every process writes its part of the checkpoints into `folder`. Only the first rank has a recorder, which
    writes all other files.
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
            self._saver = Saver(
                folder / CHECKPOINTS,
                side.devices,
                of=devices,
                keep=checkpoint.keep,
                patience_s=PATIENCE * side.request.timeout_s,
                name_of=lambda device: name_of_device(device, read_states(folder), devices=devices),
            )

    def begin(self, progress: Progress) -> None:
        """Before the first step: write the first batch and weights, and evaluate the weights.

        A run that continues has recorded them.
        """
        if self._request.continues:
            return
        if self._request.ladder:
            self._write(Rung.BATCH, Rung.INITIAL_WEIGHTS)
        self._evaluate(progress)

    @contextmanager
    def around(self, step: int) -> Generator[None]:
        """A context around a step, for observers."""
        with ExitStack() as stack:
            for observer in self._observers:
                if observer.watched == step:
                    stack.enter_context(observer.watch())
            yield

    def records_gradients(self, step: int) -> bool:
        """Whether `gradients` writes, or an observer looks at, the gradients of a step."""
        is_watched = any(observer.watched == step for observer in self._observers)
        return is_watched or bool(self._request.update_due(step))

    def gradients(self, step: int) -> None:
        """In the middle of a step: write the mean gradients, if they are due. They are not clipped yet."""
        due = self._request.update_due(step)[:1]
        if due == (Rung.GRADIENTS,) and self._experiment.model.n_experts:
            self._write(Rung.ROUTING)
        self._write(*due)
        for observer in self._observers:
            observer.gradients(step)

    def steps(self, done: Sequence[FinishedStep], window: Window) -> None:
        """Write the steps of a window, and the tensors that are due after it.

        Raises DivergedError: a loss or a norm is not finite, on all ranks.
        """
        request, first, seconds = self._request, done[0].step, window.wall_s / window.steps
        if first == request.next_step:
            self._first_step_s = seconds
        if request.timing and request.timing.is_timed(first):
            self._windows.append(window)
        for finished in done:
            watched = any(observer.watched == finished.step for observer in self._observers)
            more = {"memory_bytes": self._side.memory(), "instrumented": watched}
            line = finished.record(self._experiment, seconds=seconds, **more)
            if self._recorder:
                self._recorder.step(line)
            values = {"loss": line.loss, "gradient norm": line.grad_norm}
            wrong = [f"its {name} is {value}" for name, value in values.items() if not math.isfinite(value)]
            if wrong:
                message = f"{request.engine} diverged at step {line.step}: {' and '.join(wrong)}"
                raise DivergedError(f"{message}; {self._side.describe_non_finite()}")
        if rung := request.weights_due.get(done[-1].step + 1 - request.first_step):
            self._write(rung)
        self._write(*request.update_due(first)[1:])

    def between(self, progress: Progress) -> None:
        """Between two steps, and after the last: evaluate and save, if it is due.

        Raises:
            OSError, UnfinishedError: the checkpoint before could not be written.
            StoppedEarly: the run was asked to stop, and its checkpoint is complete.
        """
        self._evaluate(progress)
        step, last = progress.step, self._experiment.train.max_iters
        if not self._saver:
            return
        stops = step < last and self._side.should_stop()
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
            initial_sha256=self._side.initial_weights_sha256,
        )
        self._saver.save(checkpoint, self._side.checkpoint_parts())
        if stops:
            self._saver.finish()
            self._side.should_stop()  # waits until all processes have written
            stopped = f"stopped after step {step} of {last}, as asked by {STOP_SIGNAL.name}"
            raise StoppedEarly(f"{stopped}; its state is saved")

    def finish(self) -> None:
        """After the last step: wait for the last checkpoint, combine the ranks' costs, write the manifest."""
        if self._saver:
            self._saver.finish()
        request, fields = self._request, self._side.manifest_fields(self._windows, self._recorder)
        if not self._recorder:
            return
        manifest = Manifest(
            engine=request.engine,
            experiment=request.experiment,
            platform=request.platform,
            devices=request.experiment.layout.devices,
            parameters=parameter_count(request.experiment.model),
            corpus_sha256=self._side.corpus_sha256,
            initial_weights_sha256=self._side.initial_weights_sha256,
            first_step_s=self._first_step_s,
            **fields,
        )
        self._recorder.finish(manifest)

    def _evaluate(self, progress: Progress) -> None:
        if self._experiment.train.eval_interval and is_due(self._experiment, progress.step):
            progress.evaluation = self._side.evaluate(progress.step)
            if self._recorder:
                self._recorder.evaluation(progress.evaluation)

    def _write(self, *rungs: Rung) -> None:
        for rung in rungs:
            tensors = self._side.tensors(rung)
            if self._recorder:
                write_tensors(self._recorder.folder, rung, self._in_sequence(rung, tensors))

    def _in_sequence(self, rung: Rung, tensors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Tensors of a rung with positions in the order of the sequence.

        The order of the devices is the requested one, not the engine's: an engine that ignores zigzag has
        other tokens at these positions.
        """
        dim = POSITION_DIMS.get(rung)
        if dim is None:
            return tensors
        back_T = order_of_positions(self._experiment.model.block_size, self._experiment.layout).argsort()
        return {name: x if name == "keys" else x.take(back_T, axis=dim) for name, x in tensors.items()}
