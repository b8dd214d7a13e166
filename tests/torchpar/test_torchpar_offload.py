"""Optimizers with their state in host memory compute the same numbers."""

import copy

import pytest
import torch
from torch import nn

from torchpar.offload import on_host

OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
}


def two_groups(module: nn.Module) -> list[dict]:
    return [
        {"params": [p for p in module.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]


def train(module: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 3) -> None:
    for x in torch.randn(steps, 4, 8, generator=torch.Generator().manual_seed(0)):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()


@pytest.fixture
def modules():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    module.append(nn.Linear(8, 8).requires_grad_(False))
    return module, copy.deepcopy(module)


@pytest.mark.parametrize("chunk_bytes", [1, 600, 10**9])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_offload_updates_as_the_optimizer(modules, name, chunk_bytes):
    optimizer_cls, options = OPTIMIZERS[name]
    usual, offloaded = modules
    train(usual, optimizer_cls(two_groups(usual), **options))
    optimizer = on_host(optimizer_cls)(two_groups(offloaded), **options)
    optimizer.chunk_bytes = chunk_bytes
    groups = [list(group["params"]) for group in optimizer.param_groups]
    train(offloaded, optimizer)
    assert all(map(torch.equal, usual.parameters(), offloaded.parameters()))
    assert [group["params"] for group in optimizer.param_groups] == groups
