"""State of training: all that a step turns into the next."""

from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class TrainState:
    """Weights, moments, and how far training has come.

    Attributes:
        params, opt_state: trees that live on the devices; a step donates them.
        step: the place in the stream of data: the batch to come is `batch(step)`.
        updates: of the weights so far: what the schedule and Adam's bias correction follow.
    """

    params: Any
    opt_state: Any
    step: int = 0
    updates: int = 0
