"""Ends a process that hangs. JAX's devices are threads: one exit ends them all."""

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from compare.side.ending import FAILED
from compare.system.facts import Activity, look_s

GRACE_S = 10.0


class Watchdog:
    """Ends the process when nothing has been finished for `timeout_s`, unless on_hang(one line, the stack).

    A step has to end within that time. Whatever else goes on (data, compiling) only has to use the processor,
    of which on_work tells. `on_hang` returns whether to wait as long again.
    A Python thread, so that the end leaves a message. Behind it, should native code never let go of the
    interpreter, faulthandler's thread, `GRACE_S` later.
    """

    def __init__(
        self,
        timeout_s: float,
        on_hang: Callable[[str, str], bool | None],
        on_work: Callable[[], None] = lambda: None,
    ):
        self._timeout_s = timeout_s
        self._on_hang, self._on_work = on_hang, on_work
        self.finished = self.looks = 0
        self._main = threading.get_ident()
        self.progress()
        threading.Thread(target=self._watch, daemon=True).start()

    def progress(self, *, in_step: bool = False) -> None:
        """Something was finished, and perhaps a step follows: start the clock again."""
        self.in_step = in_step
        self.finished += 1
        self._restart()

    def _restart(self) -> None:
        self._deadline = time.monotonic() + self._timeout_s
        faulthandler.dump_traceback_later(self._timeout_s + GRACE_S, exit=True)

    def _watch(self) -> None:
        activity = Activity()
        while True:
            while (remaining := self._deadline - time.monotonic()) > 0:
                time.sleep(min(remaining, look_s(self._timeout_s)))
                if activity.is_busy() and not self.in_step:
                    self._restart()
                    self.looks += 1
                    self._on_work()
            frame = sys._current_frames().get(self._main)
            stack = "".join(traceback.format_stack(frame)) if frame else ""
            doing = "in a step" if self.in_step else "and nothing computed"
            message = f"no progress for {self._timeout_s:g} s {doing} (timeout_s): the run hangs"
            goes_on = False
            try:
                goes_on = self._on_hang(message, stack)
            finally:
                if not goes_on:
                    os._exit(FAILED)
            self._restart()
