"""One rank of a launch by torchrun, SLURM or hand: RANK, WORLD_SIZE and MASTER_ADDR say which.

No parent watches: each rank finds out by itself why a run ends, and the first to know leaves the word.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from msgspec.structs import replace

from compare.contract.record import Failure, clear_record, leave_failure
from compare.contract.request import Request
from compare.side.collective_bench import CollectiveRequest
from compare.side.process_states import blame_for_hang, gone_from, numbered, say, states_in, told_cause
from compare.side.processes import Process
from compare.system.facts import Activity, MissingDevicesError, look_s
from compare.system.signals import describe_exit, on_signals
from torchpar.comm.process_groups import choose_interface
from torchpar.launch import ALIKE, Rank, failure_of, gpu_of, require_gpus

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

    If the run fails, on this rank or on another one, or `work` ends early on all alike, the process ends with
    a word. Raises MissingDevicesError: another number of processes than devices, or too few GPUs.
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
        if isinstance(error, ALIKE):  # a launcher ends the others with the first that leaves
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        siblings.leave_failed(failure_of(error, rank))


class Siblings:
    """Finds out why the run ends, from inside a rank: above it is only a launcher that says nothing.

    Every rank says why before it leaves: so a rank that is gone without it was killed. Of ranks on other
    hosts a rank reads what they say; where nobody is left to say it, `compare.execute.failures` knows the
    launcher's words. `host` names this one, if there may be others.
    """

    def __init__(self, rank: Rank, folder: Path, host: str = ""):
        self._rank, self._folder, self._host = rank, folder, host and f" ({host})"

    def leave_failed(self, failure: Failure) -> NoReturn:
        """End this rank, which failed: waits a little for a rank that is to blame."""
        deadline, cause = time.monotonic() + GRACE_S, None
        while failure.is_consequence and not cause and time.monotonic() < deadline:
            time.sleep(POLL_S)
            cause = self._cause()
        place = self._host * (failure.rank >= 0)
        self._leave(cause or replace(failure, message=failure.message + place))

    def leave_signalled(self, number: int) -> NoReturn:
        """End this rank, which was told to end: torchrun ends survivors so."""
        code, rank = 128 + number, self._rank
        said = f"rank {rank.rank} was {describe_exit(code, when=rank.when)}{self._host}"
        own = Failure(message=said, rank=rank.rank, is_consequence=True, exit_code=code)
        self._leave(self._cause() or own)

    def watch(self) -> NoReturn:
        """End this rank once no phase of its steps ends within the time-out, and name who is behind.

        Before its first step it only has to compute, which the others may wait for.
        """
        rank, activity, looks = self._rank, Activity(), 0
        seen, since = rank.state, time.monotonic()
        while True:
            time.sleep(look_s(rank.timeout_s))
            if not rank.in_step and activity.is_busy():
                looks += 1
                say(self._folder, replace(rank.state, looks=looks))
            if (state := replace(rank.state, looks=looks)) != seen:
                seen, since = state, time.monotonic()
            elif time.monotonic() - since > (timeout_s := rank.timeout_s):
                if failure := blame_for_hang(self._folder, state, count=rank.world_size, timeout_s=timeout_s):
                    self._leave(failure)
                since = time.monotonic()

    def _leave(self, failure: Failure) -> NoReturn:
        """End this rank with a word on why.

        A rank that has met no other leaves no error.json: it cannot know whether rank 0 holds the folder, or
        another run does.
        """
        print(failure.message, failure.traceback, sep="\n", end="", file=sys.stderr, flush=True)
        say(self._folder, replace(self._rank.state, failure=failure))
        if self._rank.rank == 0 or self._rank.progress[2]:
            leave_failure(self._folder, failure)
        sys.stdout.flush()
        os._exit(failure.exit_code)

    def _cause(self) -> Failure | None:
        gone = gone_from(self._folder)  # before what they say
        if cause := told_cause(self._folder):
            return cause
        if not (silent := [number for number in gone if not states_in(self._folder)[number].failure]):
            return None
        why = "killed (out of memory, if nobody did it)"
        message = f"{numbered('rank', silent)} died without a word {self._rank.when}: {why}{self._host}"
        return Failure(message=message, rank=silent[0])
