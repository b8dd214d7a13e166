"""State of training: all that a step turns into the next."""

from dataclasses import dataclass
from typing import Any

from compare.contract.progress import Progress


@dataclass(kw_only=True)
class TrainState(Progress):
    """Weights, moments, and how far training has come.

    Attributes:
        params, opt_state: trees that live on the devices; a step donates them.
    """

    params: Any
    opt_state: Any
