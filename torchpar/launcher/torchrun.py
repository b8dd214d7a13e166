"""Being one rank of a launch by torchrun, SLURM or hand: RANK, WORLD_SIZE and MASTER_ADDR say which."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from compare.contract.early_stop import StoppedEarly, StopRequest
from compare.contract.exit_codes import BAD_REQUEST, STOPPED
from compare.contract.other_hosts import Waiting, blame_for_hang
from compare.contract.record import Failure, clear_record
from compare.host.facts import MissingDevicesError
from compare.host.signals import on_signals
from compare.spec.experiment import ExperimentError
from torchpar.comm.rank import Heartbeat, Rank
from torchpar.launcher.entry import require_gpus
from torchpar.launcher.siblings import Siblings
from torchpar.launcher.supervisor import RanksFailed, make_report

LOOK_S = 1.0


def become_rank(
    work: Callable[[Rank], None],
    folder: Path,
    environment: Mapping[str, str],
    *,
    devices: int,
    platform: str,
    timeout_s: float,
    saves: bool = False,
) -> None:
    """Be one rank.

    Args:
        work: what it does.
        folder: of the run.
        environment: with what the launcher says.
        devices: on which the run is: as many ranks.
        platform, timeout_s: as in the request.
        saves: its state, so that it can end early on request.

    Raises:
        MissingDevicesError: another number of processes than devices, or too few GPUs.
        RanksFailed: the run failed, on this rank or on another one.
        ExperimentError: hosts differ in what they run on.
        StoppedEarly: the run was asked to end, and saved its state.
    """
    world_size = int(environment.get("WORLD_SIZE", "1"))
    if world_size != devices:
        raise MissingDevicesError(
            f"WORLD_SIZE = {world_size}, but the layout needs {devices} devices: start {devices} processes"
        )
    number, local_rank = int(environment["RANK"]), int(environment.get("LOCAL_RANK", "0"))
    if platform == "gpu":
        require_gpus(local_rank + 1)
    rank = Rank(
        rank=number,
        world_size=world_size,
        local_rank=local_rank,
        heartbeat=Heartbeat([0] * Heartbeat.cells_for(world_size)),
        timeout_s=timeout_s,
    )
    is_alone = environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE")
    siblings = Siblings(rank, folder, host="" if is_alone else socket.gethostname())
    if number == 0:
        clear_record(folder)

    def leave(signal_number: int) -> None:
        failure = siblings.why_signalled(signal_number)
        print(failure.message, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):  # a full disk must not keep it from leaving
            siblings.leave_word(failure)
        os._exit(128 + signal_number)

    on_signals([signal.SIGINT, signal.SIGTERM], leave)
    if saves:
        StopRequest.listen()
    threading.Thread(target=_watch, args=(rank, siblings, folder), daemon=True).start()
    try:
        work(rank)
    except (ExperimentError, StoppedEarly) as error:  # all ranks alike
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher ends the others with the first that leaves
        code = STOPPED if isinstance(error, StoppedEarly) else BAD_REQUEST
        siblings.leave_word(Failure(message=str(error), exit_code=code))
        raise
    except Exception as error:
        failure = siblings.why(make_report(error, rank))
        with contextlib.suppress(OSError):
            siblings.leave_word(failure)
        raise RanksFailed(failure) from error


def _watch(rank: Rank, siblings: Siblings, folder: Path) -> None:
    """End this rank once no phase of its steps ends within the time-out, and name who is behind."""
    seen, since = rank.position, time.monotonic()
    while time.monotonic() - since < rank.timeout_s:
        time.sleep(min(rank.timeout_s / 4, LOOK_S))
        if rank.position != seen or not rank.position.in_step:  # before, the collectives' own time-out holds
            seen, since = rank.position, time.monotonic()
    own = Waiting(number=rank.rank, where=str(seen), beats=seen.beats)
    failure = blame_for_hang(folder, own, count=rank.world_size, timeout_s=rank.timeout_s)
    print(failure.message, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        siblings.leave_word(failure)
    os._exit(1)
