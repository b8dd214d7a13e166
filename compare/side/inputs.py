"""The weights that a run loads."""

from pathlib import Path

from compare.checkpoint.description import WEIGHTS
from compare.checkpoint.reader import CheckpointReader
from compare.contract.request import Request
from compare.numerics.boxes import Weights
from compare.numerics.initial_weights import checked_weights
from compare.numerics.parameters import SeedWeights, fingerprint
from compare.spec.experiment import ExperimentError
from compare.system.tensors import Tensors


def starting_parameters(request: Request) -> Weights:
    """The first weights by canonical name: from the checkpoint, the file `init_from`, or the seed.

    Weights of a checkpoint or a seed are read or drawn on demand. Raises ExperimentError: they do not fit;
    RecordError: the file cannot be read.
    """
    if request.resume:
        return CheckpointReader(Path(request.resume.checkpoint)).group(WEIGHTS)
    if not request.init_from:
        return SeedWeights(request.experiment)
    path = Path(request.init_from)
    weights = checked_weights(Tensors(path), request.experiment, f"init_from: {path}")
    if request.init_sha256 and fingerprint(weights) != request.init_sha256:
        raise ExperimentError(
            f"init_from: {request.init_from} has changed since the run was planned: start a new run"
        )
    return Weights(weights, weights.__getitem__)


def weights_to_load(request: Request) -> Weights:
    """The weights of the next step: of a run that continues from its own checkpoint, otherwise the first.

    Raises as `starting_parameters`.
    """
    if request.continues:
        return CheckpointReader(Path(request.continues.checkpoint)).group(WEIGHTS)
    return starting_parameters(request)


def starting_sha256(request: Request) -> str:
    """The fingerprint of the first weights. Raises ExperimentError as `starting_parameters`."""
    return request.init_sha256 or fingerprint(starting_parameters(request))
