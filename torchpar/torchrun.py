"""One rank of a launch by torchrun, SLURM or hand: RANK, WORLD_SIZE and MASTER_ADDR say which.

No parent watches: each rank finds out by itself why a run ends, and the first to know leaves the word.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import psutil
from msgspec.structs import replace

from compare.contract.collective_bench import CollectiveRequest
from compare.contract.command import RunFailed, told_by
from compare.contract.ending import StoppedEarly
from compare.contract.other_hosts import blame_for_hang, numbered, say, states_in, told_cause
from compare.contract.processes import Process
from compare.contract.record import Failure, clear_record, leave_failure
from compare.contract.request import Request
from compare.host.facts import Activity, MissingDevicesError, look_s
from compare.host.signals import describe_exit, on_signals
from compare.spec.experiment import ExperimentError
from torchpar.comm.process_groups import choose_interface
from torchpar.launch import Rank, failure_of, gpu_of, require_gpus

GRACE_S = 3.0  # for the rank to blame to write its error, or to be seen dead
POLL_S = 0.05


def become_rank(
    work: Callable[[Rank], None],
    folder: Path,
    request: Request | CollectiveRequest,
    process: Process | None,
    *,
    devices: int,
) -> None:
    """Do `work` as the rank that a process is among others; None is alone.

    Raises:
        MissingDevicesError: another number of processes than devices, or too few GPUs.
        RunFailed: the run failed, on this rank or on another one, or `work` ended early on all alike.
    """
    number, world_size, local_rank, host, port = process or Process(0, 1, 0, "", 0)
    if world_size != devices:
        raise MissingDevicesError(
            f"WORLD_SIZE = {world_size}, but the layout needs {devices} devices: start {devices} processes"
        )
    if host:
        choose_interface(host, port)
    if request.platform == "gpu":
        require_gpus(gpu_of(local_rank) + 1)
    rank = Rank(rank=number, world_size=world_size, local_rank=local_rank, timeout_s=request.timeout_s)
    are_together = os.environ.get("LOCAL_WORLD_SIZE") == f"{world_size}"
    siblings = Siblings(rank, folder, host="" if are_together else socket.gethostname())
    if number == 0:
        clear_record(folder)
    on_signals([signal.SIGINT, signal.SIGTERM], siblings.leave_signalled)
    threading.Thread(target=siblings.watch, daemon=True).start()
    try:
        work(rank)
    except Exception as error:
        failure = told_by(error, folder) if isinstance(error, ExperimentError | StoppedEarly) else None
        if failure:  # all ranks alike; a launcher ends the others with the first that leaves
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            failure = siblings.why(failure_of(error, rank))
        siblings.leave_word(failure)
        raise RunFailed(failure) from error


class Siblings:
    """Finds out why the run ends, from inside a rank: above it is only a launcher that says nothing.

    Every rank says why before it leaves: so a rank that is gone without it was killed. Of ranks on other
    hosts a rank reads what they say; where nobody is left to say it, `compare.execute.blame` knows the
    launcher's words. `host` names this one, if there may be others.
    """

    def __init__(self, rank: Rank, folder: Path, host: str = ""):
        self._rank, self._folder, self._host = rank, folder, f" ({host})" if host else ""
        self._failure: Failure | None = None
        self._others: dict[int, psutil.Process] = {}
        for process in psutil.Process(os.getppid()).children():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                number = environment.get("RANK", environment.get("SLURM_PROCID"))
                if number is not None and process.pid != os.getpid():
                    self._others[int(number)] = process

    def why(self, failure: Failure) -> Failure:
        """Cause of the run's end, given this rank's failure: waits a little for a rank that is to blame."""
        self._say(failure)
        deadline = time.monotonic() + GRACE_S
        while failure.is_consequence and time.monotonic() < deadline:
            if cause := self._cause():
                return cause
            time.sleep(POLL_S)
        return replace(failure, message=failure.message + self._host)

    def leave_signalled(self, number: int) -> NoReturn:
        """End this rank, which was told to end: torchrun ends survivors so."""
        how = describe_exit(128 + number, when=self._rank.position.when)
        message = f"rank {self._rank.rank} was {how}{self._host}"
        own = Failure(message=message, rank=self._rank.rank, is_consequence=True)
        self._leave(self._cause() or own, 128 + number)

    def watch(self) -> NoReturn:
        """End this rank once no phase of its steps ends within the time-out, and name who is behind.

        Before its first step it only has to compute, which the others may wait for.
        """
        rank, activity, looks = self._rank, Activity(), 0
        seen, since = rank.position, time.monotonic()
        while True:
            time.sleep(look_s(rank.timeout_s))
            if not rank.position.in_step and activity.is_busy():
                looks, since = looks + 1, time.monotonic()
                self._say(self._failure, looks=looks)
            if rank.position != seen:
                seen, since = rank.position, time.monotonic()
            if time.monotonic() - since > rank.timeout_s:
                own, count = replace(rank.state, looks=looks), rank.world_size
                if failure := blame_for_hang(self._folder, own, count=count, timeout_s=rank.timeout_s):
                    self._leave(failure, 1)
                since = time.monotonic()

    def leave_word(self, failure: Failure) -> None:
        """Say it, and leave error.json, unless another rank was first.

        A rank that has met no other leaves none: it cannot know whether rank 0 holds the folder, or another
        run does.
        """
        self._say(failure)
        if self._rank.rank == 0 or self._rank.position.phase:
            leave_failure(self._folder, failure)

    def _leave(self, failure: Failure, code: int) -> NoReturn:
        """End this rank with a word on why."""
        print(failure.message, file=sys.stderr, flush=True)
        self.leave_word(failure)
        os._exit(code)

    def _say(self, failure: Failure | None, looks: int = 0) -> None:
        self._failure = failure
        say(self._folder, replace(self._rank.state, looks=looks, failure=failure))

    def _cause(self) -> Failure | None:
        dead = [rank for rank, process in self._others.items() if _is_dead(process)]  # before what they say
        if cause := told_cause(self._folder):
            return cause
        said = {rank for rank, state in states_in(self._folder).items() if state.failure}
        dead = sorted(set(dead) - said)
        if not dead:
            return None
        when, why = self._rank.position.when, "killed (out of memory, if nobody did it)"
        message = f"{numbered('rank', dead)} died without a word {when}: {why}{self._host}"
        return Failure(message=message, rank=dead[0])


def _is_dead(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True
