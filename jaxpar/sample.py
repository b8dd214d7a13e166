"""Text from a checkpoint: `python -m jaxpar --sample JSON`, on one device."""

from pathlib import Path

import jax
import numpy as np
from flax import nnx

from compare.checkpoint.description import WEIGHTS
from compare.checkpoint.reader import CheckpointReader
from compare.numerics.sampling import SampleRequest, generate
from compare.spec.experiment import Precision
from jaxpar.model import GPT
from jaxpar.weights import from_canonical


def sample(request: SampleRequest) -> list[list[int]]:
    """Token ids of every sample. Raises CheckpointError: the checkpoint cannot be read."""
    reader = CheckpointReader(Path(request.checkpoint))
    experiment = reader.description.experiment
    model, length = experiment.model, experiment.model.block_size
    precision = Precision(dtype="float64" if experiment.precision.dtype == "float64" else "float32")
    graph, _ = nnx.split(nnx.eval_shape(lambda: GPT(model, precision=precision, remat="none")))
    params = jax.device_put(from_canonical(reader.group(WEIGHTS), model))

    @jax.jit
    def logits_NV(params, tokens_NT, last):
        return nnx.merge(graph, params)(tokens_NT)[:, last]

    def logits_of(tokens_Nt: np.ndarray) -> np.ndarray:
        """Logits (N, V) of the last position of tokens (N, t), padded to a full window: it compiles once."""
        last = tokens_Nt.shape[1] - 1
        tokens_NT = np.pad(tokens_Nt, ((0, 0), (0, length - last - 1)))
        return np.asarray(logits_NV(params, tokens_NT, last))

    return generate(request, logits_of, block_size=length)
