"""Load of this machine: whether other processes would share the processor with what is to be timed."""

import psutil

from compare.execute.launch import EnvironmentMissing

LOOK_S = 2.0
BUSY_CORES, BUSY_SHARE = 0.2, 0.05
"""Busy is more than this many cores, and more than this share of all: a large machine is never quite idle."""


def busy_cores() -> float:
    """Cores that were in use in the last `LOOK_S` seconds, in which this process only waited.

    Time that a hypervisor gave to somebody else counts, too.
    """
    return psutil.cpu_percent(interval=LOOK_S) / 100 * (psutil.cpu_count() or 1)


def is_busy(cores: float) -> bool:
    """Whether so many cores in use spoil a timing."""
    return cores > max(BUSY_CORES, BUSY_SHARE * (psutil.cpu_count() or 1))


def require_idle(cores: float, *, anyway: bool) -> None:
    """Refuse to time beside other work, unless it is wanted.

    Args:
        cores: in use, from `busy_cores`.
        anyway: do not refuse.

    Raises:
        EnvironmentMissing: what this machine lacks is an idle processor.
    """
    if is_busy(cores) and not anyway:
        raise EnvironmentMissing(
            f"this machine is busy: other processes use {cores:.1f} of its {psutil.cpu_count()} cores, and "
            f"nothing that is timed beside them holds; wait for their end, or give --anyway, which then "
            f"stands in the record"
        )
