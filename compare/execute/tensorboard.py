"""Steps and evaluations as TensorBoard's event files, one folder for each case, while it trains."""

import importlib.util
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from compare.contract.record import Step
from compare.execute.paths import can_be_folder
from compare.host.facts import MissingPackageError
from compare.numerics.evaluation import Evaluation
from compare.spec.experiment import Experiment, ExperimentError

PIP_LINE = "pip install 'shardpair[tensorboard]'"


def require_tensorboard(folder: str) -> None:
    """Refuse before anything starts what could not be written.

    Raises:
        ExperimentError: this can be no folder that we may write to.
        MissingPackageError: without the package that writes.
    """
    if folder and not can_be_folder(Path(folder)):
        raise ExperimentError(f"--tensorboard {folder} cannot be written: give a folder that can be")
    if folder and not importlib.util.find_spec("tensorboardX"):
        raise MissingPackageError(f"--tensorboard {folder}: tensorboardX is not installed: {PIP_LINE}")


def scalars(step: Step, experiment: Experiment) -> dict[str, float]:
    """Values of a step to draw, by their names in TensorBoard."""
    seconds = step.step_time_ms / 1e3
    found = {
        "train/loss": step.loss,
        "train/grad_norm": step.grad_norm,
        "train/lr": step.lr,
        "speed/step_time_ms": step.step_time_ms,
        "speed/samples_per_s": experiment.sequences_per_step / seconds,
        "speed/tokens_per_s": experiment.tokens_per_step / seconds,
    }
    if step.loss_scale:
        found["train/loss_scale"] = step.loss_scale
    if step.memory_bytes and step.peak_memory_bytes:
        found["memory/bytes"], found["memory/peak_bytes"] = step.memory_bytes, step.peak_memory_bytes
    return found


class EventFile:
    """One case's events.

    Args:
        folder: made if it is not there; None to draw nothing.
        experiment: of the case.
    """

    def __init__(self, folder: Path | None, experiment: Experiment):
        self._experiment, self._writer = experiment, None
        if folder:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(folder))

    def step(self, step: Step) -> None:
        """Draw a step."""
        self._draw(scalars(step, self._experiment), step.step)

    def evaluations(self, evaluations: list[Evaluation]) -> None:
        """Draw all evaluations of a finished case."""
        for one in evaluations:
            self._draw({"evaluation/train": one.train, "evaluation/validation": one.validation}, one.step)

    def _draw(self, values: dict[str, float], step: int) -> None:
        if self._writer:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left to be written."""
        if self._writer:
            self._writer.close()


@contextmanager
def events(folder: str, name: str, experiment: Experiment) -> Generator[EventFile]:
    """The events of a case; of none where no folder is given."""
    file = EventFile(Path(folder) / name if folder else None, experiment)
    try:
        yield file
    finally:
        file.close()


def in_turn(*followers: Callable[[Step], None]) -> Callable[[Step], None]:
    """All of them, for each step."""

    def follow(step: Step) -> None:
        for follower in followers:
            follower(step)

    return follow
