"""Text from a checkpoint: `python -m torchpar --sample JSON`, on one device."""

from pathlib import Path

import numpy as np
import torch

from compare.checkpoint.description import WEIGHTS
from compare.checkpoint.reader import CheckpointReader
from compare.numerics.sampling import SampleRequest, generate
from torchpar.model import GPT
from torchpar.weights import load_weights


@torch.inference_mode()
def sample(request: SampleRequest) -> list[list[int]]:
    """Token ids of every sample. Raises CheckpointError: the checkpoint cannot be read."""
    reader = CheckpointReader(Path(request.checkpoint))
    experiment = reader.description.experiment
    dtype = torch.float64 if experiment.precision.dtype == "float64" else torch.float32
    model = GPT(experiment.model).to(dtype)
    load_weights(model, reader.group(WEIGHTS))

    def logits_of(tokens_NT: np.ndarray) -> np.ndarray:
        logits_N1V, _ = model(torch.from_numpy(tokens_NT).long())
        return logits_N1V[:, -1].numpy()

    return generate(request, logits_of, block_size=experiment.model.block_size)
