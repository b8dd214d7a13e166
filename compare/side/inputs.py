"""The weights that a run begins with."""

from pathlib import Path

from compare.checkpoint.description import WEIGHTS
from compare.checkpoint.reader import CheckpointReader
from compare.contract.request import Request
from compare.numerics.boxes import Given, Weights
from compare.numerics.initial_weights import checked_weights
from compare.numerics.parameters import SeedWeights, fingerprint
from compare.spec.experiment import ExperimentError
from compare.system.tensors import Tensors


def starting_parameters(request: Request) -> Weights:
    """The checkpoint's weights, those of the file `init_from`, or the seed's; as they are kept, by name.

    A seed's or a checkpoint's are drawn or read when they are asked for. Raises ExperimentError: they do not
    fit; RecordError: the file cannot be read.
    """
    if request.resume:
        return CheckpointReader(Path(request.resume.checkpoint)).group(WEIGHTS)
    if not request.init_from:
        return SeedWeights(request.experiment)
    path = Path(request.init_from)
    weights = checked_weights(Tensors(path), request.experiment, f"init_from: {path}")
    if request.init_sha256 and fingerprint(weights) != request.init_sha256:
        raise ExperimentError(
            f"init_from: {request.init_from} no longer holds the weights that this run was to begin with"
        )
    return Given(weights)


def starting_sha256(request: Request) -> str:
    """The fingerprint of what `starting_parameters` gives. Raises ExperimentError like it."""
    return request.init_sha256 or fingerprint(starting_parameters(request))
