"""Load of this machine, before and after a timing: processor cores that other processes use."""

import psutil

from compare.execute.launch import EnvironmentMissing

LOOK_S = 2.0
BUSY_CORES, BUSY_SHARE = 0.2, 0.05
"""A busy machine uses more than this many cores, and more than this share of all cores."""


def busy_cores() -> float:
    """Mean number of cores in use over the next `LOOK_S` seconds, in which this process only waits.

    Time that a hypervisor gave to other guests counts.
    """
    return psutil.cpu_percent(interval=LOOK_S) / 100 * (psutil.cpu_count() or 1)


def is_busy(cores: float) -> bool:
    """Whether this many cores in use make a timing unreliable."""
    return cores > max(BUSY_CORES, BUSY_SHARE * (psutil.cpu_count() or 1))


def require_idle(cores: float, *, anyway: bool) -> None:
    """Reject a timing if other processes use this many cores. Raises EnvironmentMissing."""
    if is_busy(cores) and not anyway:
        raise EnvironmentMissing(
            f"this machine is busy: other processes use {cores:.1f} of its {psutil.cpu_count()} cores: wait "
            f"until they end, or give --anyway, which is recorded"
        )
