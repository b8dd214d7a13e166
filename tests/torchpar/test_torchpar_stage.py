"""A pipeline's stage by itself: what it saves from forward to backward, and a backward in two tasks."""

import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from torchpar.manual.stage import Stage
from torchpar.manual.zero_bubble import ZeroBubbleStage


class Chain(nn.Sequential):
    """Layers in order, as the only stage of a model."""

    def forward(self, x: torch.Tensor, *, stage: int) -> torch.Tensor:
        return super().forward(x)


class Watch(nn.Module):
    """Records weak references to its outputs, which its own backward needs."""

    def __init__(self, made: list):
        super().__init__()
        self.made = made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        self.made.append(weakref.ref(y.untyped_storage()))
        return y


def identity(y: torch.Tensor) -> torch.Tensor:
    return y


@pytest.mark.parametrize("kind", [Stage, ZeroBubbleStage])
def test_backward_frees_activations(kind):
    made = []
    stage = kind(Chain(nn.Linear(3, 3), Watch(made), nn.Linear(3, 3)), 0)
    outputs = [stage.forward(m, torch.ones(2, 3), finish=identity) for m in range(2)]
    assert all(reference() is not None for reference in made)
    stage.backward(0, torch.ones_like(outputs[0]))
    if isinstance(stage, ZeroBubbleStage):
        assert len(stage.factors[0]) == 2
        stage.backward_weight(0)
        assert 0 not in stage.factors
    assert [reference() is None for reference in made] == [True, False]
    assert list(stage.saved) == [1]


def test_split_backward_equals_whole():
    """Gradients are equal, and each task has half of the work."""
    x, dy = torch.randn(5, 8), torch.randn(5, 4)
    found = []
    for kind in (Stage, ZeroBubbleStage):
        torch.manual_seed(0)
        module = Chain(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        stage, flops = kind(module, 0), []
        stage.forward(0, x, finish=identity)
        tasks = [partial(stage.backward, 0, dy)]
        if isinstance(stage, ZeroBubbleStage):
            tasks.append(partial(stage.backward_weight, 0))
        for task in tasks:
            with FlopCounterMode(display=False) as counter:
                task()
            flops.append(counter.get_total_flops())
        found.append((flops, [parameter.grad for parameter in module.parameters()]))
    ((whole,), expected), ((of_input, of_weights), split) = found
    assert of_input == of_weights == whole // 2 == 2 * 5 * (8 * 16 + 16 * 4)
    for a, b in zip(expected, split, strict=True):
        torch.testing.assert_close(a, b)
