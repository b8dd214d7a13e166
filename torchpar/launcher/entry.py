"""From a request to running ranks: what must hold before any process starts, and who starts what."""

import functools
import importlib
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec
import numpy as np
import torch

from compare.contract import request as requests
from compare.contract.inputs import starting_sha256
from compare.contract.request import Request
from compare.host.facts import MissingDevicesError, versions
from compare.numerics.data import open_corpus
from compare.numerics.evaluation import require_validation
from compare.numerics.initial_weights import checked_weights
from compare.numerics.stream import Batches
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import ExperimentError
from torchpar.comm.devices import PACKAGES, device_kind
from torchpar.comm.rank import Rank
from torchpar.launcher.local import bind_to_loopback, launch
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
    return msgspec.structs.replace(request, corpus_sha256=corpus.sha256, init_sha256=init_sha256)


def start_ranks(
    request: Request,
    folder: Path,
    *,
    weights: Mapping[str, np.ndarray] | None = None,
    batches: Batches | None = None,
) -> None:
    """Run all ranks on this machine; the record is in `folder` then.

        from pathlib import Path
        from compare.numerics.data import open_corpus
        from compare.spec.experiment import load
        from compare.numerics.parameters import initial_parameters
        from compare.contract.record import read_record
        from compare.contract.request import Request
        from torchpar.launcher.entry import start_ranks

        experiment, folder = load("check"), Path("mine")
        folder.mkdir()
        weights = initial_parameters(experiment)        # or your own, by canonical name
        corpus = open_corpus(experiment)                # or your own batches
        request = Request(engine="torch-manual", experiment=experiment)
        start_ranks(request, folder, weights=weights, batches=lambda step: corpus.batch(experiment, step))
        record = read_record(folder, requested=False)

    Args:
        request: experiment, engine and observers of the run.
        folder: an existing one.
        weights: to begin with: canonical name -> array; see `checked_weights`. By default the request's.
        batches: step -> (inputs, targets), each int32 (A, B, T), checked at every step; every rank calls it,
            and must get the same. By default the corpus's. Picklable on GPUs and on macOS.

    Raises:
        ExperimentError: the weights do not fit the model.
        MissingDevicesError: too few GPUs.
        RanksFailed, LaunchInterrupted: from `launch`.
    """
    devices = request.experiment.layout.devices
    if request.platform == "gpu":
        require_gpus(devices)
    bind_to_loopback()
    spawn = request.platform == "gpu" or sys.platform == "darwin"
    if not spawn:
        # The first optimizer step imports it, which takes 2 s; forked ranks inherit it.
        importlib.import_module("torch._dynamo")
    own = None if weights is None else checked_weights(weights, request.experiment)
    rank_main = functools.partial(train_faulty, request=request, folder=folder, weights=own, batches=batches)
    launch(rank_main, world_size=devices, folder=folder, timeout_s=request.timeout_s, spawn=spawn)


def doctor() -> dict[str, object]:
    """Facts of this environment: package versions, CPU devices in words, GPUs by name."""
    cores = os.cpu_count() or 1
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return {
        "versions": versions(PACKAGES),
        "cpu_devices": f"any number of gloo ranks, one thread each, on {cores} cores",
        "gpus": [device_kind(torch.device("cuda", index)) for index in gpus],
    }


def train_faulty(
    rank: Rank,
    *,
    request: Request,
    folder: Path,
    weights: Mapping[str, np.ndarray] | None = None,
    batches: Batches | None = None,
) -> None:
    """Train as one rank, with the mistake that the request asks for."""
    with planted(request):
        train(rank, request=request, folder=folder, weights=weights, batches=batches)


def planted(request: Request) -> AbstractContextManager:
    """The mistake that the request asks for, if any: a run without one does not import them.

    Raises:
        ExperimentError: there is no such fault, or the engine or the layout cannot express it.
    """
    if not request.fault:
        return nullcontext()
    faults = importlib.import_module("torchpar.faults")
    return faults.plant(request.fault, engine=request.engine, layout=request.experiment.layout)


def require_gpus(needed: int) -> None:
    """Raises MissingDevicesError if PyTorch sees fewer GPUs."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < needed:
        raise MissingDevicesError(
            f"the layout needs {needed} GPUs and PyTorch sees {found}: use fewer devices, or platform cpu"
        )
