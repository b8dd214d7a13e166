"""From a request to running ranks: what must hold before any process starts, and who starts what."""

import functools
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from compare.contract import request as requests
from compare.contract.inputs import starting_sha256
from compare.contract.record import clear_record
from compare.contract.request import Request
from compare.numerics.data import open_corpus
from compare.numerics.initial_weights import checked_weights
from compare.numerics.stream import Batches, require_validation
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import ExperimentError
from torchpar.launch import launch
from torchpar.train import PARALLELIZE, PEERS, planted, train


def read_request(folder: Path) -> Request:
    """Read and check `folder/request.json`. Raises ExperimentError, MissingPackageError."""
    request = requests.read_request(folder)
    known = (*PARALLELIZE, *PEERS)
    if request.engine not in known:
        raise ExperimentError(f"engine = {request.engine}: torchpar runs {', '.join(known)}")
    engine = ENGINES[request.engine]
    engine.require_experiment(request.experiment)
    engine.require_watchable(profile=request.profile)
    engine.require_installed()
    planted(request)  # validates only: nothing is entered
    return request


def start_ranks(
    request: Request,
    folder: Path,
    *,
    weights: Mapping[str, np.ndarray] | None = None,
    batches: Batches | None = None,
) -> None:
    """Run all ranks on this machine; the record is in `folder` then: `compare.contract.record.read_record`.

    Args:
        request: experiment, engine and observers of the run.
        folder: an existing one.
        weights: to begin with: canonical name -> array, as of `compare.numerics.parameters.
            initial_parameters`. By default the request's.
        batches: step -> (inputs, targets), each int32 (A, B, T), checked at every step; every rank calls it,
            and must get the same. By default the corpus's. Picklable on GPUs and on macOS.

    Raises:
        ExperimentError: data or weights that do not fit.
        MissingDevicesError: too few GPUs.
        RunFailed: from `launch`.
    """
    if batches is None:  # ranks trust the digests
        corpus = open_corpus(request.experiment, validated_sha256=request.corpus_sha256)
        require_validation(request.experiment, corpus)
        init_sha256 = starting_sha256(request) if request.init_from or request.resume else ""
        request = replace(request, corpus_sha256=corpus.sha256, init_sha256=init_sha256)
    own = None if weights is None else checked_weights(weights, request.experiment)
    clear_record(folder)
    if request.platform != "gpu" and sys.platform != "darwin":
        # The first optimizer step imports it, which takes 2 s; forked ranks inherit it.
        importlib.import_module("torch._dynamo")
    work = functools.partial(train, request=request, folder=folder, weights=own, batches=batches)
    devices = request.experiment.layout.devices
    launch(work, world_size=devices, platform=request.platform, timeout_s=request.timeout_s)
