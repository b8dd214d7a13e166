"""The positions and dropout rows of a rank: embedding, rotation and dropout follow them."""

import torch
from torch import nn

from compare.numerics.context import order_of_positions
from compare.numerics.dropout import DropoutSite
from compare.spec.experiment import Layout
from torchpar.dropout import Dropout
from torchpar.model import GPT


def set_local_positions(model: GPT, layout: Layout, *, rank: int, device: torch.device) -> None:
    """Set the positions of a rank of cp, and the rows of its dropout masks.

    The rows of attention weights (H, T) follow the positions. With Ulysses a rank has all positions of some
    heads; under tp, of some of the heads of its rank of tp.
    """
    heads, length = model.config.n_head, model.config.block_size
    position_t = torch.tensor(order_of_positions(length, layout), device=device).chunk(layout.cp)[rank]
    model.positions = lambda length, device: position_t
    row_HT = torch.arange(heads * length, device=device).view(heads, length)
    row_by_head = row_HT.view(layout.tp, layout.cp, -1)[:, rank]
    attention_rows = row_by_head if layout.context == "ulysses" else row_HT[:, position_t]
    for dropout in dropouts(model):
        is_attention = dropout.site == DropoutSite.ATTENTION
        dropout.rows = attention_rows.flatten() if is_attention else position_t


def set_gathered_mask(model: GPT, layout: Layout, *, rank: int, device: torch.device) -> None:
    """Set local positions, and mask the local queries against keys gathered in the order of the ranks."""
    set_local_positions(model, layout, rank=rank, device=device)
    position_S = torch.tensor(order_of_positions(model.config.block_size, layout), device=device)
    for block in model.blocks:
        core = block.get_submodule("attn.core")
        core.seen_TS = position_S.chunk(layout.cp)[rank][:, None] >= position_S
        core.get_submodule("dropout").columns = position_S


def set_dropout_rows(model: nn.Module, rank: int, *, sequence_parallel: bool) -> None:
    """Set a tp rank's dropout rows: the rows of its heads, and with sequence parallelism of its positions."""
    for dropout in dropouts(model):
        if dropout.site == DropoutSite.ATTENTION or sequence_parallel:
            dropout.rank = rank


def dropouts(model: nn.Module) -> list[Dropout]:
    """All dropout modules of a model."""
    return [module for module in model.modules() if isinstance(module, Dropout)]
