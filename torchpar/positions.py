"""The positions that a rank of context parallelism has: the model's hook `positions`."""

from functools import cache

import torch

from compare.numerics.context import order_of_positions
from compare.spec.experiment import Layout


@cache
def own_positions(length: int, *, layout: Layout, rank: int, device: torch.device) -> torch.Tensor:
    """Positions in the sequence of the `length` ones of a rank along cp, int64 (length,)."""
    order_T = order_of_positions(length * layout.cp, layout)
    return torch.tensor(order_T[rank * length : (rank + 1) * length], device=device)
