"""From a request to running ranks: what must hold before any process starts, and who starts what."""

import functools
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from compare.contract import record
from compare.contract.data import open_corpus
from compare.contract.engines import ENGINES
from compare.contract.experiment import ExperimentError, revalidate
from compare.contract.record import Failure, Request, Rung
from torchpar.faults import plant
from torchpar.launch import bind_to_loopback, launch
from torchpar.rank import Heartbeat, Rank
from torchpar.run import device_kind, versions
from torchpar.train import PARALLELIZE, train
from torchpar.watch import RanksFailed, make_report


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


def clear_record(folder: Path) -> None:
    """Remove what an earlier run left, so that nobody takes it for this run's."""
    names = [record.MANIFEST, record.ERROR, record.STEPS, record.STEPS_PART, record.LEDGER]
    for name in [*names, *(f"{rung}.safetensors" for rung in Rung)]:
        (folder / name).unlink(missing_ok=True)


def start_ranks(request: Request, folder: Path) -> None:
    """Run all ranks on this machine.

    Raises:
        MissingDevicesError: too few GPUs.
        RanksFailed, Interrupted: from `launch`.
    """
    devices = request.experiment.layout.devices
    if request.platform == "gpu":
        _require_gpus(devices)
    bind_to_loopback()
    spawn = request.platform == "gpu" or sys.platform == "darwin"
    if not spawn:
        # The first optimizer step imports it, which takes 2 s; forked ranks inherit it.
        importlib.import_module("torch._dynamo")
    rank_main = functools.partial(_train_faulty, request=request, folder=folder)
    launch(rank_main, world_size=devices, folder=folder, timeout_s=request.timeout_s, spawn=spawn)


def become_rank(request: Request, folder: Path, environment: Mapping[str, str]) -> None:
    """Be one rank of a launch by torchrun or SLURM, which have set RANK, WORLD_SIZE and MASTER_ADDR.

    Raises:
        MissingDevicesError: another number of processes than the layout has devices, or too few GPUs.
        RanksFailed: this rank failed.
    """
    devices, world_size = request.experiment.layout.devices, int(environment.get("WORLD_SIZE", "1"))
    if world_size != devices:
        raise MissingDevicesError(
            f"WORLD_SIZE = {world_size}, but the layout needs {devices} devices: start {devices} processes"
        )
    number, local_rank = int(environment["RANK"]), int(environment.get("LOCAL_RANK", "0"))
    if request.platform == "gpu":
        _require_gpus(local_rank + 1)
    cells = [0] * Heartbeat.cells_for(world_size)
    rank = Rank(
        rank=number,
        world_size=world_size,
        local_rank=local_rank,
        heartbeat=Heartbeat(cells),
        timeout_s=request.timeout_s,
    )
    if number == 0:
        clear_record(folder)
    try:
        _train_faulty(rank, request=request, folder=folder)
    except Exception as error:
        report = make_report(error, rank)
        # The rank to blame wrote its error before it hung up on this one: leave that on the record.
        cause = record.read_failure(folder) if report.is_consequence else None
        if cause:
            raise RanksFailed(cause) from error
        raise RanksFailed(Failure(message=report.message, traceback=report.traceback, rank=number)) from error


def doctor() -> dict[str, object]:
    """What this environment offers: package versions, CPU devices in words, GPUs by name."""
    cores = os.cpu_count() or 1
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return {
        "versions": versions(),
        "cpu_devices": f"any number of gloo ranks, one thread each, on {cores} cores",
        "gpus": [device_kind(torch.device("cuda", index)) for index in gpus],
    }


def _train_faulty(rank: Rank, *, request: Request, folder: Path) -> None:
    with plant(request.fault, engine=request.engine, layout=request.experiment.layout):
        train(rank, request=request, folder=folder)


def _require_gpus(needed: int) -> None:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < needed:
        raise MissingDevicesError(
            f"the layout needs {needed} GPUs and PyTorch sees {found}: use fewer devices, or platform cpu"
        )
