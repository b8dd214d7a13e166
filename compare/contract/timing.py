"""Groups of the steps of a timed run, so that only training happens between two readings of the clock.

A device idles while its host waits for a step, to time it or to fetch its loss. So a timed run waits once per
window of steps. After the windows it waits for each step, which gives a median.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from msgspec import Struct

from compare.system.facts import cpu_seconds


class Timing(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Steps of a timed run, in order: warm-up, windows, a watched step, single steps.

    The watched step runs as the steps of a window do, and its time does not count. So instruments observe the
    program that was timed.
    """

    warmup: int = 3
    """Single steps that do not count. The first one allocates memory."""
    window: int = 10
    """Steps between two synchronisations of host and devices."""
    windows: int = 3
    single: int = 10
    """Steps after the watched step, with a synchronisation after each."""

    @property
    def steps(self) -> int:
        """Number of all steps: `train.max_iters` of the experiment."""
        return self.watched + 1 + self.single

    @property
    def watched(self) -> int:
        """Number of the watched step."""
        return self.warmup + self.window * self.windows

    def is_timed(self, step: int) -> bool:
        """Whether a step is part of a window."""
        return self.warmup <= step < self.watched


class Window(Struct, frozen=True, kw_only=True):
    """Steps between two synchronisations, and their cost."""

    steps: int
    wall_s: float
    """Wall seconds of the slowest process."""
    cpu_s: float
    """User plus system CPU seconds, summed over the processes."""


class Stopwatch:
    """A context that adds up wall and CPU time. `now` waits for the devices and returns seconds."""

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self.wall_s = self.cpu_s = 0.0

    def __enter__(self) -> None:
        self._begun = self._now(), cpu_seconds()

    def __exit__(self, *error: object) -> None:
        self.wall_s += self._now() - self._begun[0]
        self.cpu_s += cpu_seconds() - self._begun[1]

    @contextmanager
    def paused(self) -> Generator[None]:
        """Do not count the time of the block."""
        self.__exit__()
        yield
        self.__enter__()

    def window(self, steps: int) -> Window:
        """Window of `steps` steps with the measured times."""
        return Window(steps=steps, wall_s=self.wall_s, cpu_s=self.cpu_s)


def merged(windows: Sequence[Window]) -> Window:
    """The window of a run, from the windows of its processes."""
    return Window(
        steps=windows[0].steps,
        wall_s=max(window.wall_s for window in windows),
        cpu_s=sum(window.cpu_s for window in windows),
    )
