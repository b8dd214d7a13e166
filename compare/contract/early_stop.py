"""Ending before the last step because somebody asked for it (SIGUSR1, as SLURM sends before a time limit)."""

import signal

ASKED = signal.SIGUSR1


class StoppedEarly(Exception):
    """Training was asked to end. All processes raise it after the same step, whose state is saved."""


class StopRequest:
    """Whether this process was asked to end."""

    came = False

    @classmethod
    def listen(cls) -> None:
        """From now on the signal asks, and kills no more. Call it from the main thread."""

        def note(number: int, frame: object) -> None:
            cls.came = True

        signal.signal(ASKED, note)
