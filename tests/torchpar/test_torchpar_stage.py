"""A pipeline's stage by itself: what it keeps between forward and backward, and its split backward."""

import weakref
from functools import partial

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from torchpar.manual.stage import Stage


def test_backward_frees_what_forward_kept():
    for splits in (False, True):
        made = []
        module = nn.Sequential(nn.Linear(3, 3), Watch(made), nn.Linear(3, 3))
        stage = Stage(module, splits_backward=splits)
        outputs = [stage.forward(m, torch.ones(2, 3)) for m in range(2)]
        assert all(reference() is not None for reference in made)
        stage.backward(0, torch.ones_like(outputs[0]))
        if splits:
            assert len(stage.factors[0]) == 2
            stage.backward_weight(0)
            assert 0 not in stage.factors
        assert [reference() is None for reference in made] == [True, False]
        assert list(stage.activations) == [1]


class Watch(nn.Module):
    """Notes weak references to what it computes, which its own backward needs."""

    def __init__(self, made: list):
        super().__init__()
        self.made = made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        self.made.append(weakref.ref(y.untyped_storage()))
        return y


def test_halves_of_a_backward_are_no_more_work_than_the_whole():
    def flops(*, splits: bool) -> list[int]:
        stage = Stage(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), splits_backward=splits)
        y = stage.forward(0, torch.ones(5, 8))
        counts = []
        for half in (partial(stage.backward, 0, torch.ones_like(y)), partial(stage.backward_weight, 0)):
            with FlopCounterMode(display=False) as counter:
                if splits or half.func == stage.backward:
                    half()
            counts.append(counter.get_total_flops())
        return counts

    (whole, nothing), (of_input, of_weights) = flops(splits=False), flops(splits=True)
    assert nothing == 0
    assert of_input == of_weights == whole // 2 == 2 * 5 * (8 * 16 + 16 * 4)


def test_products_add_up_where_the_gradients_are():
    stage = Stage(layer := nn.Linear(3, 4), splits_backward=False)
    places, inputs = set(), torch.randn(3, 2, 3)
    for m, x in enumerate(inputs):
        stage.backward(m, torch.ones_like(stage.forward(m, x)))
        assert layer.weight.grad is not None
        places.add(layer.weight.grad.data_ptr())
    assert len(places) == 1
    torch.testing.assert_close(layer.weight.grad, torch.ones(4, 6) @ inputs.flatten(0, 1))
    torch.testing.assert_close(layer.bias.grad, torch.full((4,), 6.0))
