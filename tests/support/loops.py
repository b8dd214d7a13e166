"""Loops around the wrappers: ways to shard, odd optimizers, and the plain module as oracle.

The oracle trains on one rank, over the whole batch, in float64.
"""

from functools import partial

import modules
import pytest
import torch
from torch import nn

from torchpar import FSDP, DataParallel

WAYS = {
    "zero3": {"zero": 3},
    "shard_grad_op": {"zero": 3, "reshard_after_forward": False},
    "zero2": {"zero": 2},
}
UNITS = {
    "layers": lambda module: None,
    "everything": lambda module: (),
    "custom": lambda module: [[module.embedding, module.head], *module.layers],
}
each_way = pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
# Averages of four partial means in another order than one mean over all: a few units in the last place,
# which Adam's division by a gradient's own size makes a little larger.
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}
close = partial(torch.testing.assert_close, **TOLERANCE)
assert_same = partial(modules.assert_same, **TOLERANCE)
AdamW = partial(torch.optim.AdamW, lr=1e-2)


class OldSGD(torch.optim.Optimizer):
    """Updates through `.data`, which no version counter sees; as many optimizers outside of PyTorch do."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-0.1)


OPTIMIZERS = {
    "fused": partial(AdamW, fused=True),  # bumps no version counter either
    "through data": OldSGD,
}


def assert_same_weights(sharded: FSDP, reference: nn.Module) -> None:
    weights = {name: sharded.full_state_dict()[name] for name, _ in reference.named_parameters()}
    assert_same(weights, dict(reference.named_parameters()))


no_finish = partial(pytest.raises, RuntimeError, match=r"finish_gradient_synchronization\(\) before")


def finish(module: nn.Module) -> None:
    if isinstance(module, (FSDP, DataParallel)):
        module.finish_gradient_synchronization()


def train(module: nn.Module, optimizer, x: torch.Tensor, *, reduce=lambda: None, steps: int = 2) -> None:
    for _ in range(steps):
        module(x).square().mean().backward()
        reduce()
        optimizer.step()
        optimizer.zero_grad()
