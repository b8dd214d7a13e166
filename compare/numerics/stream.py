"""Source of a run's batches: its corpus, or a user's own function."""

from collections.abc import Callable

import numpy as np

from compare.numerics.data import Corpus
from compare.numerics.dropout import sequence_keys
from compare.spec.experiment import Experiment, ExperimentError

Batches = Callable[[int], tuple[np.ndarray, np.ndarray]]
"""batches(step): inputs and targets of the global batch, int32 of shape (A, B, T), as `Corpus.batch`."""


class OwnBatches:
    """A user's batches in a corpus's place, each checked: JAX would clamp a token that does not exist.

    Args:
        draw: see `Batches`. Called once a step by every rank: it must give the same everywhere.

    Attributes:
        sha256: '': there is no corpus.
    """

    sha256 = ""

    def __init__(self, draw: Batches):
        self._draw = draw

    def batch(self, experiment: Experiment, step: int) -> tuple[np.ndarray, np.ndarray]:
        """As `Corpus.batch`. Raises ExperimentError: a shape, dtype or token that does not fit."""
        train, model = experiment.train, experiment.model
        shape_ABT = (train.gradient_accumulation_steps, train.batch_size, model.block_size)
        given = self._draw(step)
        if not isinstance(given, tuple) or len(given) != 2:
            raise ExperimentError(f"batches({step}) must be a pair: inputs and targets")
        for what, array in zip(("inputs", "targets"), given, strict=True):
            if (np.shape(array), getattr(array, "dtype", None)) != (shape_ABT, np.dtype("int32")):
                found = f"{getattr(array, 'dtype', type(array).__name__)} {np.shape(array)}"
                raise ExperimentError(f"batches({step}): {what} are {found}: give int32 {shape_ABT}")
            least, most = int(array.min()), int(array.max())
            if not 0 <= least <= most < model.vocab_size:
                raise ExperimentError(
                    f"batches({step}): {what} have tokens {least} to {most}: give 0 to "
                    f"{model.vocab_size - 1}, or set model.vocab_size"
                )
        return given


def arrays_of_step(stream: Corpus | OwnBatches, experiment: Experiment, step: int) -> dict[str, np.ndarray]:
    """Arrays of one step: inputs, targets int32 (A, B, T); with dropout keys uint32 (A, B, 2)."""
    inputs, targets = stream.batch(experiment, step)
    return {"inputs": inputs, "targets": targets, **keys_of_step(experiment, step)}


def keys_of_step(experiment: Experiment, step: int) -> dict[str, np.ndarray]:
    """Keys of a step's sequences: {"keys": uint32 (A, B, 2)}; {} without dropout."""
    if not experiment.model.dropout:
        return {}
    train = experiment.train
    shape_AB = (train.gradient_accumulation_steps, train.batch_size)
    return {"keys": sequence_keys(train.seed, step, *shape_AB)}


def shapes_of_step(experiment: Experiment) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shapes and dtypes of what `arrays_of_step` gives."""
    train, model = experiment.train, experiment.model
    shape_AB = (train.gradient_accumulation_steps, train.batch_size)
    tokens = ((*shape_AB, model.block_size), np.dtype("int32"))
    keys = {"keys": ((*shape_AB, 2), np.dtype("uint32"))} if model.dropout else {}
    return {"inputs": tokens, "targets": tokens, **keys}
