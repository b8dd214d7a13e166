"""Answers to `python -m jaxpar --QUESTION`: a line of JSON instead of a training."""

from argparse import Namespace
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from msgspec.structs import replace

from compare.checkpoint.description import DESCRIPTION, WEIGHTS
from compare.checkpoint.reader import CheckpointReader
from compare.contract.chips import ChipRequest
from compare.contract.request import decode_request
from compare.numerics.sampling import SampleRequest, generate
from compare.spec.experiment import MAX_CPU_DEVICES, Precision
from compare.system.facts import cores, versions
from jaxpar import PACKAGES
from jaxpar.configuration import configure_products
from jaxpar.hooks import Hooks
from jaxpar.model import GPT
from jaxpar.weights import from_canonical


def answer(arguments: Namespace) -> object:
    """The answer, to be printed as JSON; None for a conversion, which writes files.

    Raises ExperimentError, MissingDevicesError, ImportError.
    """
    match arguments.question:
        case "sample":
            return sample(decode_request(arguments.sample, SampleRequest, source="--sample"))
        case "doctor":
            return doctor()
        case "compile":
            from jaxpar.ahead_of_time import compile_ahead

            return compile_ahead(decode_request(arguments.compile, ChipRequest, source="--compile"))
    return convert(*arguments.convert)


def convert(source: Path, target: Path) -> None:
    """Convert a checkpoint from orbax's form or to it."""
    configure_products("cpu", "float64")
    from jaxpar.orbax_checkpoint import export_checkpoint, import_checkpoint

    is_ours = (source / DESCRIPTION).is_file()
    (export_checkpoint if is_ours else import_checkpoint)(source, target)


def doctor() -> dict[str, object]:
    """Versions and devices of this environment."""
    try:
        gpus = [device.device_kind for device in jax.devices("gpu")]
    except RuntimeError:
        gpus = []
    cpu_devices = f"up to {MAX_CPU_DEVICES} virtual devices in one process, on {cores()} cores"
    return {"versions": versions(PACKAGES), "cpu_devices": cpu_devices, "gpus": gpus}


def sample(request: SampleRequest) -> list[list[int]]:
    """Token ids of every sample, on one device. Raises CheckpointError: the checkpoint cannot be read."""
    reader = CheckpointReader(Path(request.checkpoint))
    experiment = reader.description.experiment
    length = experiment.model.block_size
    dtype = "float64" if experiment.precision.dtype == "float64" else "float32"
    configure_products("cpu", dtype)
    exact = replace(experiment, precision=Precision(dtype=dtype))
    graph, _ = nnx.split(nnx.eval_shape(lambda: GPT(exact, Hooks())))
    params = jax.device_put(from_canonical(reader.group(WEIGHTS), experiment.model))

    @jax.jit
    def logits_NV(params, tokens_NT, last):
        return nnx.merge(graph, params)(tokens_NT)[:, last]

    def logits_of(tokens_Nt: np.ndarray) -> np.ndarray:
        """Logits of the last position, (N, V). Tokens are padded to a full window, so it compiles once."""
        last = tokens_Nt.shape[1] - 1
        tokens_NT = np.pad(tokens_Nt, ((0, 0), (0, length - last - 1)))
        return np.asarray(logits_NV(params, tokens_NT, last))

    return generate(request, logits_of, block_size=length)
