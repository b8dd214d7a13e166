"""Load of this machine: processor cores that other processes use, before a timing and while a case runs."""

import os
import time

import psutil
from msgspec.structs import replace

from compare.execute.launch import EnvironmentMissing
from compare.judge.outcome import Outcome

LOOK_S = 2.0
BUSY_CORES, BUSY_SHARE = 0.2, 0.05
"""A busy machine uses more than this many cores, and more than this share of all cores."""


def busy_cores() -> float:
    """Mean number of cores in use over the next `LOOK_S` seconds, in which this process only waits.

    Time that a hypervisor gave to other guests counts.
    """
    return psutil.cpu_percent(interval=LOOK_S) / 100 * (psutil.cpu_count() or 1)


def is_busy(cores: float, *, of: int) -> bool:
    """Whether this many cores in use make a timing on a machine of `of` cores unreliable."""
    return cores > max(BUSY_CORES, BUSY_SHARE * of)


def require_idle(cores: float, *, anyway: bool) -> None:
    """Reject a timing if other processes use this many cores. Raises EnvironmentMissing."""
    if is_busy(cores, of=psutil.cpu_count() or 1) and not anyway:
        raise EnvironmentMissing(
            f"this machine is busy: other processes use {cores:.1f} of its {psutil.cpu_count()} cores: wait "
            f"until they end, or give --anyway, which is recorded"
        )


class OtherProcesses:
    """CPU time of other processes since this object was made.

    The time of this process and of its children that have ended does not count.
    """

    def __init__(self) -> None:
        self._begin = self._seconds()

    def cores(self) -> float:
        """Mean number of cores that other processes used."""
        elapsed, used, own = (now - then for now, then in zip(self._seconds(), self._begin, strict=True))
        return max(used - own, 0.0) / elapsed

    @staticmethod
    def _seconds() -> tuple[float, float, float]:
        """The clock, CPU time of the machine, and CPU time of this process and its ended children."""
        machine, own = psutil.cpu_times()._asdict(), os.times()
        # Linux counts the time of guests as user time, too.
        idle = sum(machine.get(name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))
        return time.monotonic(), sum(machine.values()) - idle, sum(own[:4])


def with_load(outcome: Outcome, name: str, cores: float) -> Outcome:
    """The outcome with the cores that other processes used while a case ran."""
    circumstances = outcome.circumstances
    most = max(cores, circumstances.used_by_others.get(name, 0.0))
    loads = circumstances.used_by_others | {name: most}
    return replace(outcome, circumstances=replace(circumstances, used_by_others=loads))


def warn_of_load(outcome: Outcome) -> list[str]:
    """A warning if other processes used the machine while a case ran."""
    of, loads = outcome.circumstances.cores, outcome.circumstances.used_by_others
    busy = [cores for cores in loads.values() if is_busy(cores, of=of)]
    if not busy:
        return []
    return [
        f"Other processes used up to {max(busy):.1f} of {of} cores while {len(busy)} of {len(loads)} cases "
        f"ran: their times are too long. Repeat this on an idle machine."
    ]
