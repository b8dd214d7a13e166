"""The record of a training: which steps are written down, evaluated and saved, the same on both sides.

A side tells what only it knows: the tensors of a rung, the losses of an evaluation, the parts of a
checkpoint, what the run cost.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from msgspec import UNSET

from compare.checkpoint.description import CHECKPOINTS, Checkpoint
from compare.checkpoint.saver import Part, Saver
from compare.contract.ending import ASKED, StoppedEarly, end_if_diverged
from compare.contract.faults import IGNORED
from compare.contract.observers import FinishedStep, Observer, Observers
from compare.contract.progress import Progress
from compare.contract.record import Manifest, Recorder
from compare.contract.request import MOMENTS, REQUEST, Request, Rung
from compare.contract.timing import Window
from compare.host.facts import MemoryUse
from compare.host.json_files import read_json
from compare.numerics.evaluation import Evaluation, is_due
from compare.numerics.optimizer import moment_names
from compare.numerics.parameters import parameter_count


class RecordedSide(Protocol):
    """One process of a run, as its side tells of it. All ranks call each method together.

    Attributes:
        request: what is run.
        devices: the numbers of this process's devices.
        corpus_sha256: of the data.
    """

    request: Request
    devices: Collection[int]
    corpus_sha256: str

    def memory(self) -> MemoryUse:
        """In use now."""
        ...

    def not_finite(self) -> str:
        """A clause about the first tensor that is not finite."""
        ...

    def tensors(self, rung: Rung) -> Mapping[str, np.ndarray]:
        """Those of a rung as they are now, by canonical name."""
        ...

    def evaluate(self, step: int) -> Evaluation:
        """Evaluate the weights after so many steps."""
        ...

    def is_to_stop(self) -> bool:
        """Whether any process was asked to end early: the same on all, which meet here."""
        ...

    def parts(self) -> Iterable[Part]:
        """What this process's devices hold now: weights and moments."""
        ...

    def costs(self, windows: Sequence[Window], recorder: Recorder | None) -> dict[str, Any]:
        """Leave the ledger and the memory of a step. Returns fields of the manifest that only the side knows.

        Args:
            windows: of this process, in a timed run.
            recorder: writes; None on all ranks but the first, of which nothing is returned either.
        """
        ...


def observers_of(
    side: RecordedSide,
    recorder: Recorder | None,
    folder: Path,
    *,
    started_utc: str,
    own: Sequence[Observer] = (),
) -> Observers:
    """What watches a training, in the order in which it is told: `own` are observers of the side's own.

    `recorder` is None on all ranks but the first.
    """
    experiment, steps = side.request.experiment, Steps(side, recorder, own)
    observers: list[Observer] = [steps]
    if side.request.ladder:
        observers.append(Ladder(side, recorder))
    if experiment.train.eval_interval:
        observers.append(Evaluating(side, recorder))
    if experiment.checkpoint.every:
        observers.append(Saving(side, folder))
    return Observers([*observers, *own, Summary(side, recorder, steps, started_utc)])


class Steps(Observer):
    """Writes steps.jsonl, and ends a run whose numbers are no longer finite.

    Attributes:
        first_step_s: wall time of the first step.
        windows: of a timed run, in order.
    """

    def __init__(self, side: RecordedSide, recorder: Recorder | None, others: Sequence[Observer] = ()):
        self._side, self._recorder, self._others = side, recorder, others
        self.first_step_s = 0.0
        self.windows: list[Window] = []

    def steps(self, done: Sequence[FinishedStep], window: Window) -> None:
        """Append a line each. Raises DivergedError: a loss or a norm is not finite, on all ranks alike."""
        request, first = self._side.request, done[0].start.step
        if first == request.first_step:
            self.first_step_s = window.wall_s / window.steps
        if request.timing and request.timing.is_in_window(first):
            self.windows.append(window)
        for one in done:
            self._append(one, seconds=window.wall_s / window.steps)

    def _append(self, done: FinishedStep, *, seconds: float) -> None:
        request = self._side.request
        line = done.start.record(
            request.experiment,
            loss=float(done.loss),
            grad_norm=float(done.grad_norm),
            seconds=seconds,
            memory=self._side.memory(),
            instrumented=any(one.watched == done.start.step for one in self._others),
        )
        if self._recorder:
            self._recorder.step(line)
        end_if_diverged(request.engine, line, where=self._side.not_finite)


class Ladder(Observer):
    """Leaves the tensors that the ladder compares."""

    def __init__(self, side: RecordedSide, recorder: Recorder | None):
        self._side, self._recorder, self._request = side, recorder, side.request

    def begin(self, progress: Progress) -> None:
        """The first batch, and the weights."""
        self._leave(Rung.BATCH, Rung.INITIAL_WEIGHTS)

    def gradients(self, step: int) -> None:
        """The first step's."""
        if step == self._request.first_step:
            self._leave(Rung.GRADIENTS)

    def steps(self, done: Sequence[FinishedStep], window: Window) -> None:
        """Weights where they are due, and moments after the first step."""
        step = done[-1].start.step
        if rung := self._request.weights_due_after(step):
            self._leave(rung)
        if step == self._request.first_step:
            names = moment_names(self._request.experiment.optimizer)
            self._leave(*(rung for rung, name in MOMENTS.items() if name in names))

    def _leave(self, *rungs: Rung) -> None:
        for rung in rungs:
            tensors = self._side.tensors(rung)
            if self._recorder:
                self._recorder.tensors(rung, tensors)


class Evaluating(Observer):
    """Evaluates the weights where that is due, and writes evaluations.jsonl."""

    def __init__(self, side: RecordedSide, recorder: Recorder | None):
        self._side, self._recorder = side, recorder

    def begin(self, progress: Progress) -> None:
        """The weights to begin with."""
        self.between(progress)

    def between(self, progress: Progress) -> None:
        """The weights as they are."""
        if is_due(self._side.request.experiment, progress.step):
            progress.evaluation = self._side.evaluate(progress.step)
            if self._recorder:
                self._recorder.evaluation(progress.evaluation)


class Saving(Observer):
    """Saves the state after every `checkpoint.every` steps, after the last, and when it is asked to end."""

    def __init__(self, side: RecordedSide, folder: Path):
        experiment, self._side = side.request.experiment, side
        devices, of = side.devices, experiment.layout.devices
        self._saver = Saver(folder / CHECKPOINTS, devices, of=of, keep=experiment.checkpoint.keep)

    def between(self, progress: Progress) -> None:
        """Save if that is due.

        Raises:
            DiskFull, OSError: the checkpoint before could not be written.
            StoppedEarly: the run was asked to end here, and this one is complete.
        """
        request, step = self._side.request, progress.step
        is_last = step == request.experiment.train.max_iters
        stops = not is_last and self._side.is_to_stop()
        if not stops and not is_last and step % request.experiment.checkpoint.every:
            return
        checkpoint = Checkpoint(
            engine=request.engine,
            experiment=request.experiment,
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
            raise StoppedEarly(
                f"stopped after step {step} of {request.experiment.train.max_iters}, as asked by "
                f"{ASKED.name}; its state is saved"
            )

    def finish(self) -> None:
        """Wait until the last checkpoint is complete. Raises DiskFull or OSError: it could not be written."""
        self._saver.finish()


class Summary(Observer):
    """Completes the record, after all others: manifest.json."""

    def __init__(self, side: RecordedSide, recorder: Recorder | None, steps: Steps, started_utc: str):
        self._side, self._recorder, self._steps, self._started_utc = side, recorder, steps, started_utc

    def finish(self) -> None:
        """Put the ranks' costs together."""
        costs = self._side.costs(self._steps.windows, self._recorder)
        if not self._recorder:
            return
        request = self._side.request
        asked = request
        if request.fault in IGNORED:
            asked = read_json(self._recorder.folder / REQUEST, Request)
        manifest = Manifest(
            engine=request.engine,
            experiment=asked.experiment,
            platform=request.platform,
            devices=request.experiment.layout.devices,
            parameters=parameter_count(request.experiment.model),
            corpus_sha256=self._side.corpus_sha256,
            started_utc=self._started_utc,
            first_step_s=self._steps.first_step_s,
            **costs,
        )
        self._recorder.finish(manifest)
