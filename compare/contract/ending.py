"""How a run ends before its last step: exit codes, numbers that are not finite, and a signal that asks."""

import math
import signal
from collections.abc import Callable, Mapping

import numpy as np

from compare.contract.record import Step

DONE, FAILED = 0, 1
BAD_REQUEST = 2
"""What was asked for, or what an input is like, cannot be: nothing was trained."""
MISSING = 3
"""Devices or packages."""
STOPPED = 4
"""Not finished, as somebody asked; nothing is wrong."""
MEANT = frozenset({BAD_REQUEST, MISSING, STOPPED})
"""Those that say more than that it failed."""
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

        def note(number: int, frame: object) -> None:
            cls.came = True

        signal.signal(ASKED, note)


def end_if_diverged(engine: str, step: Step, *, where: Callable[[], str]) -> None:
    """Nothing, if the loss and the gradient norm of a step are finite.

    Args:
        engine: its name.
        step: already recorded, so that the record shows how the run ended.
        where: called only after divergence: a clause about the first tensor that is not finite.

    Raises:
        DivergedError: one of them is not.
    """
    values = {"loss": step.loss, "gradient norm": step.grad_norm}
    wrong = [f"its {name} is {value}" for name, value in values.items() if not math.isfinite(value)]
    if wrong:
        raise DivergedError(f"{engine} diverged at step {step.step}: {' and '.join(wrong)}; {where()}")


def first_not_finite(tensors: Mapping[str, np.ndarray]) -> str:
    """The name of the first tensor with an entry that is not finite; '' if every entry is."""
    return next((name for name, tensor in tensors.items() if not np.isfinite(tensor).all()), "")
