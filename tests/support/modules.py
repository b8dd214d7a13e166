"""Modules of all kinds that a strategy may have to wrap, their data, and how two are compared."""

from collections.abc import Mapping

import torch
from ranks import RANKS
from torch import nn

double = torch.float64


class Residual(nn.Module):
    """A custom layer: parameters of its own beside those of a submodule, one frozen, one a scalar."""

    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Linear(width, width, dtype=double)
        self.scale = nn.Parameter(torch.randn(width, dtype=double))
        self.gate = nn.Parameter(torch.tensor(0.5, dtype=double))
        self.shift = nn.Parameter(torch.randn(3, dtype=double), requires_grad=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": x + self.gate * torch.tanh(self.inner(x) * self.scale) + self.shift.sum()}


class Odd(nn.Module):
    """Layers of odd sizes; tied, frozen, strided parameters, some at the top; two dtypes, a buffer."""

    def __init__(self, seed: int = 0, width: int = 6):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, width, dtype=double)
        self.layers = nn.ModuleList(Residual(width) for _ in range(3))
        self.strided = nn.Parameter(torch.randn(5, width, dtype=double).t())
        self.single = nn.Parameter(torch.randn(5))
        self.frozen = nn.Parameter(torch.randn(5, dtype=double), requires_grad=False)
        self.head = nn.Linear(width, 7, bias=False, dtype=double)
        self.head.weight = self.embedding.weight
        self.register_buffer("offset", torch.randn(5, dtype=double))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)["out"]
        y = x @ self.strided + self.frozen + self.offset
        # The float32 parameter stands alone, so that its rounding does not reach the others.
        return self.head(x).square().mean() + y.square().mean() + self.single.double().square().mean()


def stack(layers: int = 6, width: int = 16) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(width, width, dtype=double) for _ in range(layers)))


def ids(step: int = 0, count: int = 16) -> torch.Tensor:
    """A batch for `Odd`."""
    return torch.randint(7, (count,), generator=torch.Generator().manual_seed(step))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers, the same on all ranks."""
    return torch.randn(*shape, dtype=double, generator=torch.Generator().manual_seed(seed))


def share(whole: torch.Tensor, rank: int, dim: int = 0) -> torch.Tensor:
    return whole.chunk(RANKS, dim)[rank]


def assert_same(
    got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, rtol: float, atol: float
) -> None:
    """The same names, and each tensor within the tolerance of its dtype."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        tolerance = {"rtol": rtol, "atol": atol}
        if tensor.dtype == torch.float32:
            tolerance = {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(
            got[name], tensor, **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
