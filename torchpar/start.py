"""From a request to running ranks: what must hold before any process starts, and who starts what."""

import functools
import importlib
import os
import sys
from pathlib import Path

import msgspec
import torch

from compare.contract import record
from compare.contract.data import open_corpus
from compare.contract.engines import ENGINES
from compare.contract.experiment import ExperimentError, revalidate
from compare.contract.record import Request
from torchpar.faults import plant
from torchpar.launch import bind_to_loopback, launch
from torchpar.rank import Rank
from torchpar.run import device_kind, versions
from torchpar.train import PARALLELIZE, train


class MissingDevicesError(RuntimeError):
    """This machine lacks what the layout needs; the message says both numbers and what to do."""


def read_request(folder: Path) -> Request:
    """Read and check `folder/request.json`.

    Raises:
        ExperimentError: there is none, it is malformed, or what it asks for cannot work.
    """
    path = folder / record.REQUEST
    try:
        request = record.read_json(path, Request)
    except OSError as error:
        raise ExperimentError(f"{path}: {error.strerror}: write a request there first") from None
    except msgspec.DecodeError as error:
        raise ExperimentError(f"{path}: {error}") from None
    if request.engine not in PARALLELIZE:
        raise ExperimentError(f"engine = {request.engine}: torchpar runs {', '.join(PARALLELIZE)}")
    experiment = revalidate(request.experiment)
    ENGINES[request.engine].require(experiment.layout, platform=request.platform)
    plant(request.fault, engine=request.engine, layout=experiment.layout)  # only to hear its objections
    return request


def validate_data(request: Request) -> Request:
    """The request with the digest of its data, so that the ranks need not validate it again."""
    sha256 = open_corpus(request.experiment, validated_sha256=request.corpus_sha256).sha256
    return msgspec.structs.replace(request, corpus_sha256=sha256)


def start_ranks(request: Request, folder: Path) -> None:
    """Run all ranks on this machine.

    Raises:
        MissingDevicesError: too few GPUs.
        RanksFailed, Interrupted: from `launch`.
    """
    devices = request.experiment.layout.devices
    if request.platform == "gpu":
        require_gpus(devices)
    bind_to_loopback()
    spawn = request.platform == "gpu" or sys.platform == "darwin"
    if not spawn:
        # The first optimizer step imports it, which takes 2 s; forked ranks inherit it.
        importlib.import_module("torch._dynamo")
    rank_main = functools.partial(train_faulty, request=request, folder=folder)
    launch(rank_main, world_size=devices, folder=folder, timeout_s=request.timeout_s, spawn=spawn)


def doctor() -> dict[str, object]:
    """What this environment offers: package versions, CPU devices in words, GPUs by name."""
    cores = os.cpu_count() or 1
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return {
        "versions": versions(),
        "cpu_devices": f"any number of gloo ranks, one thread each, on {cores} cores",
        "gpus": [device_kind(torch.device("cuda", index)) for index in gpus],
    }


def train_faulty(rank: Rank, *, request: Request, folder: Path) -> None:
    """Train as one rank, with the mistake that the request asks for."""
    with plant(request.fault, engine=request.engine, layout=request.experiment.layout):
        train(rank, request=request, folder=folder)


def require_gpus(needed: int) -> None:
    """Raises MissingDevicesError if PyTorch sees fewer GPUs."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < needed:
        raise MissingDevicesError(
            f"the layout needs {needed} GPUs and PyTorch sees {found}: use fewer devices, or platform cpu"
        )
