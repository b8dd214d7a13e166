"""Divergence: a loss or a gradient norm that is not finite ends a run at its step."""

import math
from collections.abc import Callable, Mapping

import numpy as np

from compare.contract.record import Step


class DivergedError(RuntimeError):
    """Training left the finite numbers. The message is one line: engine, step, and what is not finite."""


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
    wrong = [f"its {what} is {value}" for what, value in values.items() if not math.isfinite(value)]
    if wrong:
        raise DivergedError(f"{engine} diverged at step {step.step}: {' and '.join(wrong)}; {where()}")


def first_not_finite(tensors: Mapping[str, np.ndarray]) -> str:
    """The name of the first tensor with an entry that is not finite; '' if every entry is."""
    return next((name for name, tensor in tensors.items() if not np.isfinite(tensor).all()), "")
