"""From a request to running ranks: what must hold before any process starts, and who starts what."""

import functools
import importlib
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from compare.contract import request as requests
from compare.contract.inputs import starting_sha256
from compare.contract.request import Request
from compare.host.facts import versions
from compare.numerics.data import open_corpus
from compare.numerics.evaluation import require_validation
from compare.numerics.initial_weights import checked_weights
from compare.numerics.stream import Batches
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import ExperimentError
from torchpar.comm.mesh import PACKAGES, device_kind
from torchpar.launch import Rank, launch
from torchpar.train import PARALLELIZE, PEERS, train


def read_request(folder: Path) -> Request:
    """Read and check `folder/request.json`.

    Raises:
        ExperimentError: there is none, it is malformed, or what it asks for cannot work.
        MissingPackageError: a peer that is not installed.
    """
    request = requests.read_request(folder)
    known = (*PARALLELIZE, *PEERS)
    if request.engine not in known:
        raise ExperimentError(f"engine = {request.engine}: torchpar runs {', '.join(known)}")
    ENGINES[request.engine].require_experiment(request.experiment)
    ENGINES[request.engine].require_watchable(profile=request.profile)
    ENGINES[request.engine].require_installed()
    planted(request)  # validates only: nothing is entered
    return request


def validate_data(request: Request) -> Request:
    """The request with the digests of its data and of its own weights, which the ranks then trust.

    Raises:
        ExperimentError: data or weights that do not fit.
    """
    corpus = open_corpus(request.experiment, validated_sha256=request.corpus_sha256)
    require_validation(request.experiment, corpus)
    init_sha256 = starting_sha256(request) if request.init_from or request.resume else ""
    return replace(request, corpus_sha256=corpus.sha256, init_sha256=init_sha256)


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
        ExperimentError: the weights do not fit the model.
        MissingDevicesError: too few GPUs.
        RanksFailed, LaunchInterrupted: from `launch`.
    """
    if request.platform != "gpu" and sys.platform != "darwin":
        # The first optimizer step imports it, which takes 2 s; forked ranks inherit it.
        importlib.import_module("torch._dynamo")
    own = None if weights is None else checked_weights(weights, request.experiment)
    rank_main = functools.partial(train_faulty, request=request, folder=folder, weights=own, batches=batches)
    devices = request.experiment.layout.devices
    launch(rank_main, world_size=devices, platform=request.platform, timeout_s=request.timeout_s)


def doctor() -> dict[str, object]:
    """Facts of this environment: package versions, CPU devices in words, GPUs by name."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return {
        "versions": versions(PACKAGES),
        "cpu_devices": f"any number of gloo ranks, one thread each, on {os.cpu_count() or 1} cores",
        "gpus": [device_kind(torch.device("cuda", index)) for index in gpus],
    }


def train_faulty(rank: Rank, *, request: Request, folder: Path, **given: Any) -> None:
    """Train as one rank, with the mistake that the request asks for; `given` are weights and batches."""
    with planted(request):
        train(rank, request=request, folder=folder, **given)


def planted(request: Request) -> AbstractContextManager:
    """The mistake that the request asks for, if any: a run without one does not import them.

    Raises:
        ExperimentError: there is no such fault, or the engine or the layout cannot express it.
    """
    if not request.fault:
        return nullcontext()
    faults = importlib.import_module("torchpar.faults")
    return faults.plant(request.fault, engine=request.engine, layout=request.experiment.layout)
