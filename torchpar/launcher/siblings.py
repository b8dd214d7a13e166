"""The other ranks on this host, when torchrun or SLURM has started all: which of them died without a word."""

import os
import time
from pathlib import Path

import psutil

from compare.contract.record import Failure, read_failure, write_failure
from compare.host.exits import describe_exit
from torchpar.comm.rank import Rank
from torchpar.launcher.supervisor import RankFailure

GRACE_S = 3.0  # for the rank to blame to write its error, or to be seen dead
POLL_S = 0.05


class Siblings:
    """Finds out why the run ends, from inside a rank: above it is only a launcher that says nothing.

    Every rank leaves error.json before it leaves, unless there is one: so a rank that is gone without it was
    killed.

    Args:
        rank: this process.
        folder: the run's.
    """

    def __init__(self, rank: Rank, folder: Path):
        self._rank = rank
        self._folder = folder
        self._others = _ranks_beside_us()

    def why(self, report: RankFailure) -> Failure:
        """Cause of the run's end, given what ended this rank: waits a little for a rank that is to blame."""
        deadline = time.monotonic() + GRACE_S
        while report.is_consequence and time.monotonic() < deadline:
            if cause := self._cause():
                return cause
            time.sleep(POLL_S)
        return report.failure

    def why_signalled(self, number: int) -> Failure:
        """Cause of the run's end, given that this rank was told to end: torchrun ends survivors so."""
        how = describe_exit(128 + number, when=self._rank.position.when)
        return self._cause() or Failure(message=f"rank {self._rank.rank} was {how}", rank=self._rank.rank)

    def leave_word(self, failure: Failure) -> None:
        """Leave error.json, unless another rank was first.

        A rank that has met no other leaves none: it cannot know whether rank 0 holds the folder, or another
        run does.
        """
        if (self._rank.rank == 0 or self._rank.position.has_joined) and not read_failure(self._folder):
            write_failure(self._folder, failure)

    def _cause(self) -> Failure | None:
        dead = [rank for rank, process in self._others.items() if _is_dead(process)]  # before what they left
        if failure := read_failure(self._folder):
            return failure
        if not dead:
            return None
        names = f"rank{'s' if len(dead) > 1 else ''} {', '.join(map(str, dead))}"
        when = self._rank.position.when
        message = f"{names} died without a word {when}: killed (out of memory, if nobody did it)"
        return Failure(message=message, rank=dead[0])


def _ranks_beside_us() -> dict[int, psutil.Process]:
    """The children of our parent that have a RANK of their own."""
    found = {}
    for process in psutil.Process(os.getppid()).children():
        try:
            rank = process.environ().get("RANK")
        except psutil.Error:
            continue
        if rank is not None and process.pid != os.getpid():
            found[int(rank)] = process
    return dict(sorted(found.items()))


def _is_dead(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
