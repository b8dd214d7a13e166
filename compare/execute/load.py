"""Load of this machine: whether other processes would share the processor with what is to be timed."""

import time

import psutil

from compare.execute.launch import EnvironmentMissing
from compare.system.facts import cpu_seconds

LOOK_S = 2.0
BUSY_CORES, BUSY_SHARE = 0.2, 0.05
"""Busy is more than this many cores, and more than this share of all: a large machine is never quite idle."""


def busy_cores() -> float:
    """Cores that were in use in the last `LOOK_S` seconds, in which this process only waited.

    Time that a hypervisor gave to somebody else counts, too.
    """
    return psutil.cpu_percent(interval=LOOK_S) / 100 * (psutil.cpu_count() or 1)


class LoadBeside:
    """Cores that others use while processes of ours run, from when this is made.

    Our processes are those that this one has waited for. Time that a hypervisor gave to somebody else counts
    as theirs: a bench that asked before each round alone has been slowed fourfold in the middle of one.
    """

    def __init__(self) -> None:
        self._begun, self._all_s, self._own_s = time.monotonic(), _all_s(), cpu_seconds()

    def cores(self) -> float:
        """The mean so far."""
        others_s = (_all_s() - self._all_s) - (cpu_seconds() - self._own_s)
        return max(0.0, others_s / (time.monotonic() - self._begun))


def _all_s() -> float:
    """CPU seconds of this machine that were not idle, a hypervisor's other guests included."""
    times = psutil.cpu_times()._asdict()
    counted_twice = ("guest", "guest_nice")  # they are in user and nice, too
    return sum(spent for name, spent in times.items() if name not in ("idle", "iowait", *counted_twice))


def is_busy(cores: float) -> bool:
    """Whether so many cores in use spoil a timing."""
    return cores > max(BUSY_CORES, BUSY_SHARE * (psutil.cpu_count() or 1))


def require_idle(cores: float, *, anyway: bool) -> None:
    """Refuse to time beside other work, which uses so many cores. Raises EnvironmentMissing."""
    if is_busy(cores) and not anyway:
        raise EnvironmentMissing(
            f"this machine is busy: other processes use {cores:.1f} of its {psutil.cpu_count()} cores, and "
            f"nothing that is timed beside them holds; wait for their end, or give --anyway, which then "
            f"stands in the record"
        )
