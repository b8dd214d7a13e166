"""Inputs of a run: the weights that it begins with, and its batches."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from compare.checkpoint.description import WEIGHTS
from compare.checkpoint.reader import CheckpointReader
from compare.contract.request import Request
from compare.numerics.boxes import Given, Weights
from compare.numerics.data import Corpus, open_corpus
from compare.numerics.initial_weights import checked_weights, read_weights
from compare.numerics.parameters import SeedWeights, fingerprint
from compare.numerics.stream import Batches, OwnBatches
from compare.spec.experiment import ExperimentError


def open_stream(request: Request, batches: Batches | None = None) -> Corpus | OwnBatches:
    """A user's batches if there are any, else the corpus. Raises ExperimentError like `open_corpus`."""
    if batches is not None:
        return OwnBatches(batches)
    return open_corpus(request.experiment, validated_sha256=request.corpus_sha256)


def starting_parameters(request: Request, own: Mapping[str, np.ndarray] | None = None) -> Weights:
    """The weights that a run begins with, by canonical name, in the dtype in which they are kept.

    They are `own`, from Python, the checkpoint's, those of the file `init_from`, or the seed's. A seed's or a
    checkpoint's are drawn or read when they are asked for. Raises ExperimentError: they do not fit.
    """
    if own is not None:
        if request.resume:
            raise ExperimentError(
                f"weights: the run goes on from {request.resume.checkpoint}, which has its own"
            )
        return Given(checked_weights(own, request.experiment))
    if request.resume:
        return CheckpointReader(Path(request.resume.checkpoint)).group(WEIGHTS)
    if not request.init_from:
        return SeedWeights(request.experiment)
    weights = read_weights(Path(request.init_from), request.experiment)
    if request.init_sha256 and fingerprint(weights) != request.init_sha256:
        raise ExperimentError(
            f"init_from: {request.init_from} no longer holds the weights that this run was to begin with"
        )
    return Given(weights)


def starting_sha256(request: Request) -> str:
    """The fingerprint of what `starting_parameters` gives. Raises ExperimentError like it."""
    return request.init_sha256 or fingerprint(starting_parameters(request))
