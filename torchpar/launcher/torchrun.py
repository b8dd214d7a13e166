"""Being one rank of a launch by torchrun or SLURM, which set RANK, WORLD_SIZE and MASTER_ADDR."""

import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from compare.contract.record import clear_record
from compare.contract.request import Request
from compare.host.facts import MissingDevicesError
from compare.host.signals import on_signals
from torchpar.comm.rank import Heartbeat, Rank
from torchpar.launcher.entry import require_gpus, train_faulty
from torchpar.launcher.siblings import Siblings
from torchpar.launcher.supervisor import RanksFailed, make_report


def become_rank(request: Request, folder: Path, environment: Mapping[str, str]) -> None:
    """Be one rank.

    Raises:
        MissingDevicesError: another number of processes than the layout has devices, or too few GPUs.
        RanksFailed: the run failed, on this rank or on another one.
    """
    devices, world_size = request.experiment.layout.devices, int(environment.get("WORLD_SIZE", "1"))
    if world_size != devices:
        raise MissingDevicesError(
            f"WORLD_SIZE = {world_size}, but the layout needs {devices} devices: start {devices} processes"
        )
    number, local_rank = int(environment["RANK"]), int(environment.get("LOCAL_RANK", "0"))
    if request.platform == "gpu":
        require_gpus(local_rank + 1)
    rank = Rank(
        rank=number,
        world_size=world_size,
        local_rank=local_rank,
        heartbeat=Heartbeat([0] * Heartbeat.cells_for(world_size)),
        timeout_s=request.timeout_s,
    )
    siblings = Siblings(rank, folder)
    if number == 0:
        clear_record(folder)

    def leave(signal_number: int) -> None:
        failure = siblings.why_signalled(signal_number)
        print(failure.message, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):  # a full disk must not keep it from leaving
            siblings.leave_word(failure)
        os._exit(128 + signal_number)

    on_signals([signal.SIGINT, signal.SIGTERM], leave)
    try:
        train_faulty(rank, request=request, folder=folder)
    except Exception as error:
        failure = siblings.why(make_report(error, rank))
        with contextlib.suppress(OSError):
            siblings.leave_word(failure)
        raise RanksFailed(failure) from error
