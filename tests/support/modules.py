"""Small modules and random tensors for the tests on ranks."""

import torch
from torch import nn

from tests.support.ranks import RANKS

double = torch.float64


def stack(layers: int = 6, width: int = 16) -> nn.Sequential:
    """Linear layers in float64, the same on all ranks."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(width, width, dtype=double) for _ in range(layers)))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers, the same on all ranks."""
    return torch.randn(*shape, dtype=double, generator=torch.Generator().manual_seed(seed))


def share(whole: torch.Tensor, rank: int, dim: int = 0) -> torch.Tensor:
    """The rank's chunk of a tensor along `dim`."""
    return whole.chunk(RANKS, dim)[rank]
