"""Dropout by counters, as `compare.numerics.dropout` defines it.

PyTorch has no arithmetic of unsigned words: they are int32, whose sums wrap around just so, and whose shifts
to the right are cleared of the sign that they bring in.

Legend: B sequences, 2 the words of a key; G groups of four in the last dim.
"""

import math

import torch
from torch import nn

from compare.numerics.dropout import (
    BITS,
    OUTSIDE,
    PARITY,
    ROTATIONS,
    ROUNDS,
    DropoutSite,
    kept_scale,
    site_number,
    threshold,
)
from compare.spec.checks import LANES

HALF = 2**BITS - 1


class Dropout(nn.Module):
    """Dropout at one place of the model, in a layer, counted from 1, or `OUTSIDE`."""

    def __init__(self, rate: float, site: DropoutSite, layer: int = OUTSIDE):
        super().__init__()
        self.rate, self.site, self.number = rate, site, site_number(layer, site)
        self.part = 0  # number of this rank's part among equal parts of the rows: see `split_rows`
        # Where rows are cut by position: the numbers of those that tp has parts of, (R,), by default all; and
        # the order of the places in a row, (N,). See `positions.take_positions`.
        self.rows: torch.Tensor | None = None
        self.places: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, keys_B2: torch.Tensor | None = None) -> torch.Tensor:
        """x (B, ..., N) with some elements dropped and the others scaled; without keys x itself."""
        if keys_B2 is None:
            return x
        shape, count = tuple(x.shape[1:]), math.prod(x.shape[1:-1])
        row_R = torch.arange(self.part * count, (self.part + 1) * count, device=x.device)
        row_R = row_R if self.rows is None else self.rows[row_R]
        kept = is_kept(keys_B2, self.number, shape, rate=self.rate, row_R=row_R)
        kept = kept if self.places is None else kept[..., self.places]
        return torch.where(kept, x * kept_scale(self.rate), 0.0)


def split_rows(model: nn.Module, part: int, *, sequence_parallel: bool) -> None:
    """Say which rows a rank has that tensor parallelism gives some of the heads, or of the positions."""
    for module in model.modules():
        if isinstance(module, Dropout) and (module.site == DropoutSite.ATTENTION or sequence_parallel):
            module.part = part


@torch.no_grad()
def is_kept(
    keys_B2: torch.Tensor, site: int, shape: tuple[int, ...], *, rate: float, row_R: torch.Tensor
) -> torch.Tensor:
    """Mask of the kept elements of a site, by its number: bool (B, *shape).

    The shape is of a sequence's elements that are here. Rows are all dims but the last: `row_R` are their
    numbers in the whole sequence.
    """
    groups = -(-shape[-1] // LANES)
    numbers = (row_R[:, None] * groups + torch.arange(groups, device=row_R.device)).flatten()
    site_1 = torch.tensor([_signed(site)], dtype=torch.int32, device=keys_B2.device)
    words = threefry((keys_B2[:, :1], keys_B2[:, 1:]), site_1, numbers.to(torch.int32)[None])
    lanes = [half for word in words for half in (word & HALF, (word >> BITS) & HALF)]
    bits = torch.stack(lanes, dim=-1).view(len(keys_B2), *shape[:-1], groups * LANES)
    return bits[..., : shape[-1]] >= threshold(rate)


def threefry(
    key: tuple[torch.Tensor, torch.Tensor], first: torch.Tensor, second: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Threefry-2x32 of each pair of counter words: int32 of any shapes, broadcast against each other."""
    keys = [*key, key[0] ^ key[1] ^ _signed(PARITY)]
    x, y = torch.broadcast_tensors(first + keys[0], second + keys[1])
    x, y = x.clone(), y.clone()
    for block in range(ROUNDS // 4):
        for rotation in ROTATIONS[block % 2]:
            x.add_(y)
            carried = (y >> (32 - rotation)).bitwise_and_(2**rotation - 1)
            y.bitwise_left_shift_(rotation).bitwise_or_(carried).bitwise_xor_(x)
        x.add_(keys[(block + 1) % 3])
        y.add_(keys[(block + 2) % 3]).add_(block + 1)
    return x, y


def _signed(word: int) -> int:
    """The int32 with the bits of an unsigned word."""
    return word - 2**32 if word >= 2**31 else word
