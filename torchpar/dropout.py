"""Dropout whose mask depends only on keys and positions, as `compare.numerics.dropout` defines it.

PyTorch has no unsigned 32-bit arithmetic, so words are int32. Sums wrap around in the same way. A shift to
the right copies the sign, so the copied bits are cleared.

B sequences, 2 words of a key, R rows of a mask.
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
    """Dropout at one site of the model, in a layer counted from 1, or `OUTSIDE` of the layers.

    A mask has a row for each position, and of attention weights for each head and position. `positions` sets
    which rows are here.

    Attributes:
        rank: this rank's index among those that have an equal share of the rows.
        rows: global row of each of all these ranks' rows, (R,). None: they are in order.
        columns: global column of each column, (N,). None: they are in order.
    """

    def __init__(self, rate: float, site: DropoutSite, layer: int = OUTSIDE):
        super().__init__()
        self.rate, self.site, self.number = rate, site, site_number(layer, site)
        self.rank = 0
        self.rows: torch.Tensor | None = None
        self.columns: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, keys_B2: torch.Tensor | None = None) -> torch.Tensor:
        """x (B, ..., N), with some elements zero and the others scaled up. Without keys x itself."""
        if keys_B2 is None:
            return x
        shape, count = tuple(x.shape[1:]), math.prod(x.shape[1:-1])
        row_R = torch.arange(self.rank * count, (self.rank + 1) * count, device=x.device)
        row_R = row_R if self.rows is None else self.rows[row_R]
        kept = is_kept(keys_B2, self.number, shape, rate=self.rate, row_R=row_R)
        kept = kept if self.columns is None else kept[..., self.columns]
        return torch.where(kept, x * kept_scale(self.rate), 0.0)


@torch.no_grad()
def is_kept(
    keys_B2: torch.Tensor, site: int, shape: tuple[int, ...], *, rate: float, row_R: torch.Tensor
) -> torch.Tensor:
    """Mask of the kept elements of a site, by its number: bool (B, *shape).

    `shape` is that of one sequence's elements on this rank. All dims but the last are rows, and `row_R` are
    their global numbers.
    """
    groups = -(-shape[-1] // LANES)
    numbers = (row_R[:, None] * groups + torch.arange(groups, device=row_R.device)).flatten()
    words = threefry((keys_B2[:, :1], keys_B2[:, 1:]), _signed(site), numbers.to(torch.int32)[None])
    lanes = [half for word in words for half in (word & HALF, (word >> BITS) & HALF)]
    bits = torch.stack(lanes, dim=-1).view(len(keys_B2), *shape[:-1], groups * LANES)
    return bits[..., : shape[-1]] >= threshold(rate)


def threefry(
    key: tuple[torch.Tensor, torch.Tensor], first: torch.Tensor | int, second: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Threefry-2x32 of each pair of counter words, int32 of any shapes that broadcast, or an int of 32 bits.

    Source: Salmon et al., Parallel random numbers (SC 2011).
    """
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
    """The int32 that has the bits of an unsigned word."""
    return word - 2**32 if word >= 2**31 else word
