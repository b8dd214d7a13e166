"""Activity of a process: a long compilation computes, and a hang does not."""

import time
from collections.abc import Callable

# Of one core. A process that waits for others polls with 1 %; one that computes gets more than this even on a
# machine with ten times as many busy processes as cores.
BUSY_SHARE = 0.05
LOOK_S = 1.0


def look_s(timeout_s: float) -> float:
    """Seconds between two looks, if a hang is to be noticed after `timeout_s`."""
    return min(LOOK_S, timeout_s / 4)


class Activity:
    """Tells from CPU seconds whether anything was computed since the last look.

    Args:
        cpu_seconds: what has been used so far.
    """

    def __init__(self, cpu_seconds: Callable[[], float]):
        self._cpu_seconds = cpu_seconds
        self._used, self._at = cpu_seconds(), time.monotonic()

    def is_busy(self) -> bool:
        """True if more than `BUSY_SHARE` of a core was used since the last call."""
        used, now = self._cpu_seconds(), time.monotonic()
        share = (used - self._used) / max(now - self._at, 1e-9)
        self._used, self._at = used, now
        return share > BUSY_SHARE
