"""Steps and evaluations as TensorBoard's event files, one folder for each case, while it trains."""

import importlib.util
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from compare.contract.record import Step
from compare.execute.paths import can_be_folder
from compare.host.facts import MissingPackageError
from compare.spec.experiment import Experiment, ExperimentError

PIP_LINE = "pip install 'shardpair[tensorboard]'"


def require_tensorboard(folder: str) -> None:
    """Refuse, before anything starts, a folder that cannot be written, or to write without the package."""
    if folder and not can_be_folder(Path(folder)):
        raise ExperimentError(f"--tensorboard {folder} cannot be written: give a folder that can be")
    if folder and not importlib.util.find_spec("tensorboardX"):
        raise MissingPackageError(f"--tensorboard {folder}: tensorboardX is not installed: {PIP_LINE}")


def scalars(step: Step, experiment: Experiment) -> dict[str, float]:
    """Values of a step to draw, by their names in TensorBoard."""
    seconds = step.step_time_ms / 1e3
    values = {
        "train/loss": step.loss,
        "train/grad_norm": step.grad_norm,
        "train/lr": step.lr,
        "speed/step_time_ms": step.step_time_ms,
        "speed/samples_per_s": experiment.sequences_per_step / seconds,
        "speed/tokens_per_s": experiment.tokens_per_step / seconds,
    }
    optional = {"train/loss_scale": step.loss_scale, "memory/bytes": step.memory_bytes}
    return values | {name: value for name, value in optional.items() if value}


@contextmanager
def events(folder: str, name: str) -> Generator[Callable[[dict[str, float], int], None]]:
    """Yields what draws values by name at a step, in a case's own folder; nothing is drawn without one."""
    if not folder:
        yield lambda values, step: None
        return
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(Path(folder) / name)) as writer:

        def draw(values: dict[str, float], step: int) -> None:
            for tag, value in values.items():
                writer.add_scalar(tag, value, step)

        yield draw
