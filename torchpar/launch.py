"""Start ranks on this machine, or be one rank of torchrun, SLURM or a user's own launcher.

`launch` forks ranks itself instead of using torchelastic. A fork takes 0.1 s; a new interpreter imports
PyTorch for seconds. Ranks share their position with the parent, so that it reports the step of a killed rank.
Under every launcher a rank has the supervisor of `compare.side.supervisor`, which names the rank that fails,
hangs or is behind.
"""

import contextlib
import ctypes
import mmap
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection, parent_process
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch

from compare.contract.record import Failure
from compare.side.ending import STOP_SIGNAL, RunFailed, StopRequest
from compare.side.process_states import Heartbeat, find_first_cause
from compare.side.processes import Process
from compare.side.supervisor import Supervisor
from compare.system.facts import MissingDevicesError, cpu_seconds
from compare.system.signals import describe_exit, is_ignored
from compare.system.workers import end_with_parent
from torchpar.comm.gloo import choose_interface, is_consequence
from torchpar.private import flight_record

POLL_S = 0.1
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Rank:
    """One process among `world_size`.

    Attributes:
        rank, world_size: among all processes.
        local_rank: among the processes of this host.
        rendezvous: the file through which forked ranks meet; None for MASTER_ADDR and MASTER_PORT.
        timeout_s: seconds without progress after which the run counts as hung.
        launcher_cpu_s: CPU seconds that the parent spent before it forked.
        heartbeat: the position of the rank, in memory that a parent may share.
    """

    rank: int
    world_size: int
    local_rank: int
    rendezvous: Path | None = None
    timeout_s: float = 600.0
    launcher_cpu_s: float = 0.0
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    def at(self, step: int, phase: str) -> None:
        """Enter a phase of a step (one of `process_states.PHASES`)."""
        self.heartbeat.at(step, phase)

    def supervise(self, work: Callable[["Rank"], None], folder: Path) -> None:
        """Do `work(rank)` under a supervisor, whose states are in the folder."""
        supervisor = Supervisor(
            side="torchpar",
            folder=folder,
            number=self.rank,
            count=self.world_size,
            noun="rank",
            timeout_s=self.timeout_s,
            is_consequence=is_consequence,
            has_parent=self.rendezvous is not None,
            heartbeat=self.heartbeat,
            begun=collectives_begun,
        )
        supervisor.run(partial(work, self))


def launch(
    main: Callable[[Rank], None], world_size: int, *, platform: str = "cpu", timeout_s: float = 600.0
) -> None:
    """Run `main(rank)` in `world_size` processes of this machine, and wait until all are done.

    Call it once, in the main thread: it handles SIGINT and SIGTERM, unless they are ignored, and ignores them
    at the end. GPUs and macOS do not survive a fork: ranks are spawned there, and `main` must be picklable.

    Raises:
        MissingDevicesError: too few GPUs.
        RunFailed: a rank failed, was killed or hangs; or SIGINT or SIGTERM came.
    """
    if platform == "gpu":
        require_gpus(world_size)
    spawns = platform == "gpu" or sys.platform == "darwin"
    context: SpawnContext | ForkContext = SpawnContext() if spawns else ForkContext()
    spent_s, ranks, processes = cpu_seconds(), list[Rank](), list[BaseProcess]()
    for number in SIGNALS:
        if not is_ignored(number):
            signal.signal(number, _interrupt)
    with tempfile.TemporaryDirectory(prefix="torchpar-") as folder:
        try:
            for number in range(world_size):
                rank = Rank(
                    rank=number,
                    world_size=world_size,
                    local_rank=number,
                    rendezvous=Path(folder, "rendezvous"),
                    timeout_s=timeout_s,
                    launcher_cpu_s=spent_s,
                    heartbeat=Heartbeat(shared_cells(context)),
                )
                ranks.append(rank)
                processes.append(context.Process(target=_run_forked_rank, args=(main, rank, Path(folder))))
                processes[-1].start()
            _wait(processes, ranks, Path(folder))
        finally:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            alive = multiprocessing.active_children()
            for process in alive:
                process.kill()  # SIGTERM does not end a stopped process
            for process in alive:
                process.join()


def shared_cells(context: SpawnContext | ForkContext) -> Any:
    """Three integers that this process shares with the ranks. Forked ranks need no /dev/shm for them."""
    if isinstance(context, SpawnContext):
        return context.RawArray("q", 3)
    return (ctypes.c_int64 * 3).from_buffer(mmap.mmap(-1, 24))


def _wait(processes: list[BaseProcess], ranks: list[Rank], folder: Path) -> None:
    """Wait until all ranks are done; pass a stop request on to rank 0. Raises RunFailed: a rank failed."""

    def exit_codes() -> dict[int, int]:
        """Codes of the ranks that failed, or left within a step."""
        codes = {number: process.exitcode for number, process in enumerate(processes)}
        return {
            number: code
            for number, code in codes.items()
            if code or (code == 0 and ranks[number].heartbeat.in_step)
        }

    while (running := [p.sentinel for p in processes if p.exitcode is None]) and not exit_codes():
        if StopRequest.came and ranks[0].heartbeat.in_step:
            StopRequest.came = False
            os.kill(processes[0].pid or 0, STOP_SIGNAL)  # the ranks agree on the step
        connection.wait(running, timeout=POLL_S)
    if exit_codes():
        name, when = "rank {}".format, lambda number: ranks[number].heartbeat.when
        raise RunFailed(find_first_cause(folder, exit_codes, name, when))


def _run_forked_rank(main: Callable[[Rank], None], rank: Rank, folder: Path) -> NoReturn:
    """The life of a forked rank. It ends by os._exit: destructors of a broken process group may block."""
    parent = parent_process()
    assert parent
    end_with_parent(parent.pid or 0)
    choose_interface("127.0.0.1")
    rank.supervise(main, folder)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _interrupt(number: int, frame: object) -> NoReturn:
    raise RunFailed(Failure(message=describe_exit(128 + number), exit_code=128 + number))


def run_as_rank(
    main: Callable[[Rank], None],
    process: Process,
    folder: Path,
    world_size: int,
    *,
    platform: str = "cpu",
    timeout_s: float = 600.0,
) -> None:
    """Do `main(rank)` as the rank that a launcher gave this process. If the run fails, the process ends.

    Raises MissingDevicesError: the launcher started another number of processes, or there are too few GPUs.
    """
    if process.count != world_size:
        raise MissingDevicesError(
            f"WORLD_SIZE = {process.count}, but the layout needs {world_size} devices: start {world_size} "
            "processes"
        )
    os.environ.update(process.variables)  # SLURM has other names for them
    choose_interface(process.host, process.port)
    if platform == "gpu":
        require_gpus(gpu_of(process.local) + 1)
    rank = Rank(rank=process.number, world_size=world_size, local_rank=process.local, timeout_s=timeout_s)
    rank.supervise(main, folder)


def collectives_begun() -> dict[str, int]:
    """By group of NCCL, the number of the last collective whose kernel has begun; {} without NCCL."""
    last = dict[str, int]()
    for call in flight_record().get("entries", ()):
        if not call["is_p2p"] and call["profiling_name"].startswith("nccl:"):
            group, number = call["process_group"][0], call["collective_seq_id"]
            last[group] = max(last.get(group, 0), 0 if call["state"] == "scheduled" else number)
    return last


def require_gpus(needed: int) -> None:
    """Raises MissingDevicesError if PyTorch finds fewer GPUs."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < needed:
        raise MissingDevicesError(
            f"the layout needs {needed} GPUs and PyTorch finds {found}: use fewer devices, or platform cpu"
        )


def gpu_of(local_rank: int) -> int:
    """The index of a rank's GPU. SLURM may make only one GPU visible to each task (`--gpus-per-task=1`)."""
    return 0 if "SLURM_PROCID" in os.environ and torch.cuda.device_count() == 1 else local_rank
