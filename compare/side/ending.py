"""How a run ends before its last step: exit codes, errors, and a signal that asks."""

import signal

DONE, FAILED = 0, 1
BAD_REQUEST = 2
"""What was asked for, or what an input is like, cannot be: nothing was trained."""
MISSING = 3
"""Devices or packages."""
STOPPED = 4
"""Not finished, as somebody asked; nothing is wrong."""
ASKED = signal.SIGUSR1
"""SLURM sends it before a time limit."""


class DivergedError(RuntimeError):
    """Training left the finite numbers. The message is one line: engine, step, and what is not finite."""


class StoppedEarly(Exception):
    """Training was asked to end. All processes raise it after the same step, whose state is saved."""


class StopRequest:
    """Whether this process was asked to end."""

    came = False

    @classmethod
    def listen(cls) -> None:
        """From now on the signal asks, and kills no more. Call it from the main thread."""
        signal.signal(ASKED, lambda number, frame: setattr(cls, "came", True))
