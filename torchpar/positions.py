"""The positions that a rank of context parallelism has: embedding and dropout follow them."""

from functools import cache, partial

import torch

from compare.numerics.context import order_of_positions
from compare.numerics.dropout import DropoutSite
from compare.spec.experiment import Layout
from torchpar.dropout import Dropout
from torchpar.model import GPT


def take_positions(model: GPT, layout: Layout, *, rank: int, device: torch.device) -> None:
    """Say which positions a rank along cp has: of each sequence, and of each row of attention's weights.

    With Ulysses it has all rows of some heads; of those that tp leaves it, if tp splits them.
    """
    model.positions = partial(own_positions, layout=layout, rank=rank)
    heads, length = model.config.n_head, model.config.block_size
    position_t = model.positions(length // layout.cp, device=device)
    row_HT = torch.arange(heads * length, device=device).view(heads, length)
    of_heads = row_HT.view(layout.tp, layout.cp, -1)[:, rank]
    of_attention = of_heads if layout.context == "ulysses" else row_HT[:, position_t]
    for module in model.modules():
        if isinstance(module, Dropout):
            is_attention = module.site == DropoutSite.ATTENTION
            module.rows = of_attention.flatten() if is_attention else position_t


@cache
def own_positions(length: int, *, layout: Layout, rank: int, device: torch.device) -> torch.Tensor:
    """Positions in the sequence of the `length` ones of a rank along cp, int64 (length,)."""
    order_T = order_of_positions(length * layout.cp, layout)
    return torch.tensor(order_T[rank * length : (rank + 1) * length], device=device)
