"""The positions that a rank of context parallelism has: embedding, rotation and dropout follow them."""

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
    heads, length = model.config.n_head, model.config.block_size
    position_t = torch.tensor(order_of_positions(length, layout), device=device).chunk(layout.cp)[rank]
    model.positions = lambda length, device: position_t
    row_HT = torch.arange(heads * length, device=device).view(heads, length)
    of_heads = row_HT.view(layout.tp, layout.cp, -1)[:, rank]
    of_attention = of_heads if layout.context == "ulysses" else row_HT[:, position_t]
    for module in model.modules():
        if isinstance(module, Dropout):
            is_attention = module.site == DropoutSite.ATTENTION
            module.rows = of_attention.flatten() if is_attention else position_t


def see_gathered(model: GPT, layout: Layout, *, rank: int, device: torch.device) -> None:
    """The same, and let each position see those of all ranks, gathered in their order, up to its own."""
    take_positions(model, layout, rank=rank, device=device)
    position_S = torch.tensor(order_of_positions(model.config.block_size, layout), device=device)
    for block in model.blocks:
        core = block.get_submodule("attn.core")
        core.seen_TS = position_S.chunk(layout.cp)[rank][:, None] >= position_S
        core.get_submodule("dropout").places = position_S
