"""From a request to running ranks: what must hold before any process starts, and who starts what."""

import functools
import importlib
import sys
from pathlib import Path

from msgspec.structs import replace

from compare.contract import request as requests
from compare.contract.inputs import starting_sha256
from compare.contract.record import clear_record
from compare.contract.request import Request
from compare.numerics.data import open_corpus
from compare.numerics.stream import require_validation
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


def start_ranks(request: Request, folder: Path) -> None:
    """Run all ranks on this machine; the record is in `folder` then, an existing one.

    Raises:
        ExperimentError: data or weights that do not fit.
        MissingDevicesError: too few GPUs.
        RunFailed: from `launch`.
    """
    corpus = open_corpus(request.experiment, validated_sha256=request.corpus_sha256)
    require_validation(request.experiment, corpus)
    init_sha256 = starting_sha256(request) if request.init_from or request.resume else ""
    request = replace(request, corpus_sha256=corpus.sha256, init_sha256=init_sha256)  # ranks trust these
    clear_record(folder)
    if request.platform != "gpu" and sys.platform != "darwin":
        # The first optimizer step imports it, which takes 2 s; forked ranks inherit it.
        importlib.import_module("torch._dynamo")
    work = functools.partial(train, request=request, folder=folder)
    devices = request.experiment.layout.devices
    launch(work, world_size=devices, platform=request.platform, timeout_s=request.timeout_s)
