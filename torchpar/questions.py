"""Answers to `python -m torchpar --QUESTION`: a line of JSON instead of a training."""

from argparse import Namespace
from pathlib import Path

import msgspec
import numpy as np
import torch

from compare.checkpoint.description import WEIGHTS
from compare.checkpoint.reader import CheckpointReader
from compare.contract.request import decode_request
from compare.numerics.sampling import SampleRequest, generate
from compare.spec.experiment import Experiment
from compare.system.facts import cores, versions
from torchpar import PACKAGES
from torchpar.comm.mesh import device_kind
from torchpar.model import GPT
from torchpar.nanogpt_checkpoint import export_checkpoint, import_checkpoint
from torchpar.weights import load_weights


def answer(arguments: Namespace) -> object:
    """The answer, to be printed as JSON; None for a conversion, which writes files.

    Raises ExperimentError, MissingDevicesError.
    """
    match arguments.question:
        case "sample":
            return sample(decode_request(arguments.sample, SampleRequest, source="--sample"))
        case "doctor":
            return doctor()
    return convert(*arguments.convert, arguments.base)


def convert(source: Path, target: Path, base: str) -> None:
    """Convert a checkpoint from nanoGPT's form or to it; `base` is an experiment in JSON, or ''."""
    if source.is_dir():
        export_checkpoint(source, target)
    else:
        import_checkpoint(source, target, msgspec.json.decode(base, type=Experiment) if base else None)


def doctor() -> dict[str, object]:
    """Versions and devices of this environment."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return {
        "versions": versions(PACKAGES),
        "cpu_devices": f"any number of gloo ranks, one thread each, on {cores()} cores",
        "gpus": [device_kind(torch.device("cuda", index)) for index in gpus],
    }


@torch.inference_mode()
def sample(request: SampleRequest) -> list[list[int]]:
    """Token ids of every sample, on one CPU device. Raises CheckpointError: the checkpoint cannot be read."""
    reader = CheckpointReader(Path(request.checkpoint))
    experiment = reader.description.experiment
    dtype = torch.float64 if experiment.precision.dtype == "float64" else torch.float32
    model = GPT(experiment.model).to(dtype)
    load_weights(model, reader.group(WEIGHTS))

    def logits_of(tokens_NT: np.ndarray) -> np.ndarray:
        """Logits of the last position, (N, V)."""
        logits_N1V, _ = model(torch.from_numpy(tokens_NT).long())
        return logits_N1V[:, -1].numpy()

    return generate(request, logits_of, block_size=experiment.model.block_size)
