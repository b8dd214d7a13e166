"""When a run saves what."""

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from msgspec import UNSET

from compare.checkpoint.description import CHECKPOINTS, Checkpoint
from compare.checkpoint.saver import Part, Saver
from compare.contract.observers import Observer
from compare.contract.progress import Progress
from compare.contract.request import Request


class Saving(Observer):
    """Saves the state after every `checkpoint.every` steps, and after the last.

    Args:
        request: what is run.
        folder: of the run.
        devices: the numbers of this process's devices.
        corpus_sha256: of the data.
        parts: what this process's devices hold now: weights and moments.
    """

    def __init__(
        self,
        request: Request,
        folder: Path,
        *,
        devices: Collection[int],
        corpus_sha256: str,
        parts: Callable[[], Iterable[Part]],
    ):
        self._request, self._corpus_sha256, self._parts = request, corpus_sha256, parts
        choice, of = request.experiment.checkpoint, request.experiment.layout.devices
        self._every = choice.every
        self._saver = Saver(folder / CHECKPOINTS, devices, of=of, keep=choice.keep)

    def between(self, progress: Progress) -> None:
        """Save if that is due. Raises DiskFull or OSError: the checkpoint before could not be written."""
        experiment, step = self._request.experiment, progress.step
        if step % self._every and step != experiment.train.max_iters:
            return
        checkpoint = Checkpoint(
            engine=self._request.engine,
            experiment=experiment,
            step=step,
            updates=progress.updates,
            loss_scale=progress.loss_scale or UNSET,
            validation_loss=progress.evaluation.validation if progress.evaluation else UNSET,
            corpus_sha256=self._corpus_sha256,
        )
        self._saver.save(checkpoint, self._parts())

    def finish(self) -> None:
        """Wait until the last checkpoint is complete. Raises DiskFull or OSError: it could not be written."""
        self._saver.finish()
