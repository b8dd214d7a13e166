"""The other ranks, when a launcher of several processes has started all: which of them died without a word.

On its own host a rank sees them. Of those on other hosts it reads what they leave in the folder of the run,
and where nobody is left to say it, `compare.execute.hosts` knows how each process ended.
"""

import os
import time
from pathlib import Path

import psutil
from msgspec.structs import replace

from compare.contract.record import WAITING, Failure, leave_failure, read_failure
from compare.host.signals import describe_exit
from torchpar.comm.rank import Rank
from torchpar.launcher.supervisor import RankFailure

GRACE_S = 3.0  # for the rank to blame to write its error, or to be seen dead
POLL_S = 0.05


class Siblings:
    """Finds out why the run ends, from inside a rank: above it is only a launcher that says nothing.

    Every rank leaves a mark before it leaves: so a rank that is gone without it was killed.

    Args:
        rank: this process.
        folder: the run's.
        host: name of this one, if there may be others.
    """

    def __init__(self, rank: Rank, folder: Path, host: str = ""):
        self._rank, self._host = rank, host
        self._folder = folder
        self._others = _ranks_beside_us()

    def why(self, report: RankFailure) -> Failure:
        """Cause of the run's end, given what ended this rank: waits a little for a rank that is to blame."""
        deadline = time.monotonic() + GRACE_S
        while report.is_consequence and time.monotonic() < deadline:
            if cause := self._cause():
                return cause
            time.sleep(POLL_S)
        return self._here(report.failure)

    def why_signalled(self, number: int) -> Failure:
        """Cause of the run's end, given that this rank was told to end: torchrun ends survivors so."""
        how, rank = describe_exit(128 + number, when=self._rank.position.when), self._rank.rank
        return self._cause() or self._here(
            Failure(message=f"rank {rank} was {how}", rank=rank, is_consequence=True)
        )

    def leave_word(self, failure: Failure) -> None:
        """Leave error.json, unless another rank was first.

        A rank that has met no other leaves none: it cannot know whether rank 0 holds the folder, or another
        run does.
        """
        if self._rank.rank == 0 or self._rank.position.has_joined:
            leave_failure(self._folder, failure)
            self._mark(self._rank.rank).touch()

    def _mark(self, rank: int) -> Path:
        """The file that a rank which saw the end leaves: its word is another one's, where that came first."""
        return self._folder / f"{WAITING}{rank}.left"

    def _cause(self) -> Failure | None:
        dead = [rank for rank, process in self._others.items() if _is_dead(process)]  # before what they left
        failure = read_failure(self._folder)
        if failure and not failure.is_consequence:
            return failure
        dead = [rank for rank in dead if not self._mark(rank).is_file()]
        if not dead:
            return None
        names = f"rank{'s' if len(dead) > 1 else ''} {', '.join(map(str, dead))}"
        when = self._rank.position.when
        message = f"{names} died without a word {when}: killed (out of memory, if nobody did it)"
        return self._here(Failure(message=message, rank=dead[0]))

    def _here(self, failure: Failure) -> Failure:
        """A failure of this host, which is named where the ranks may be on several."""
        return replace(failure, message=f"{failure.message} ({self._host})") if self._host else failure


def _ranks_beside_us() -> dict[int, psutil.Process]:
    """The children of our parent that have a RANK of their own, as torchrun gives it, or SLURM."""
    found = {}
    for process in psutil.Process(os.getppid()).children():
        try:
            environment = process.environ()
            rank = environment.get("RANK", environment.get("SLURM_PROCID"))
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
