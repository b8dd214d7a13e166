"""How the steps of a timed run are grouped, so that nothing but training happens between two readings.

A host that waits for each step, to time it or to fetch its loss, leaves the device idle meanwhile. A timed
run waits once a window of steps; the steps after the windows are waited for one by one, for their median.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from msgspec import Struct

from compare.system.facts import cpu_seconds


class Timing(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Steps of a timed run: `warmup` one by one, `windows` of `window` steps, one that is watched, `single`.

    The watched one runs as those of the windows do, and its time does not count: what instruments see there
    is what was timed.
    """

    warmup: int = 3
    """Steps one by one that do not count: the first pays for memory."""
    window: int = 10
    """Steps between two synchronisations of host and devices."""
    windows: int = 3
    single: int = 10
    """Steps after that, each waited for."""

    @property
    def steps(self) -> int:
        """All of them: `train.max_iters` of the experiment."""
        return self.watched + 1 + self.single

    @property
    def watched(self) -> int:
        """The step that instruments watch."""
        return self.warmup + self.window * self.windows

    def is_timed(self, step: int) -> bool:
        """Whether a step is one of a window's."""
        return self.warmup <= step < self.watched


class Window(Struct, frozen=True, kw_only=True):
    """Steps between two synchronisations, and what they cost."""

    steps: int
    wall_s: float
    """Wall seconds of the slowest process."""
    cpu_s: float
    """User plus system CPU seconds, summed over the processes."""


class Stopwatch:
    """Adds up wall and CPU time of what runs while it is entered; `now` waits for the devices."""

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
        """Leave out what runs inside."""
        self.__exit__()
        yield
        self.__enter__()

    def window(self, steps: int) -> Window:
        """Window of `steps` steps with the measured times."""
        return Window(steps=steps, wall_s=self.wall_s, cpu_s=self.cpu_s)


def merged(windows: Sequence[Window]) -> Window:
    """One window of several processes, as the whole run saw it."""
    return Window(
        steps=windows[0].steps,
        wall_s=max(window.wall_s for window in windows),
        cpu_s=sum(window.cpu_s for window in windows),
    )
