"""Tensor-parallel layers around any module, on four gloo ranks, in float64.

The oracle is the same module, whole, on one rank. Shapes: B batch, T sequence, C channels.
"""

from functools import partial

import pytest
import torch
from modules import normal, share
from ranks import axis, on_ranks
from torch import nn

from torchpar.comm.collectives import Axis
from torchpar.manual.megatron.mappings import scatter_to_region
from torchpar.manual.megatron.vocab_parallel import VocabParallelEmbedding
from torchpar.manual.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    synchronize_replicated_gradients,
)
from torchpar.swap import swap

# Sums in another order than one device's: a few units in the last place, of numbers of order 1.
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14)


class Net(nn.Module):
    """Fused pairs, a frozen bias, a norm between, whatever activation: nothing like a GPT."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 24, dtype=torch.float64)  # two tensors of 12 side by side, multiplied
        self.down = nn.Linear(12, 6, dtype=torch.float64)
        self.norm = nn.LayerNorm(6, dtype=torch.float64)
        self.out = nn.Linear(6, 8, bias=False, dtype=torch.float64)
        self.up.bias.requires_grad_(False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(x_BTC).unflatten(-1, (2, -1)).unbind(-2)
        return self.out(self.norm(self.down(torch.sigmoid(gate) * value) + x_BTC))


def reference_net(x_BTC: torch.Tensor) -> tuple[Net, torch.Tensor, torch.Tensor]:
    net = Net()
    leaf = x_BTC.clone().requires_grad_()
    y = net(leaf)
    y.sin().sum().backward()
    return net, y, leaf.grad


def assert_gradients(whole: nn.Module, split: nn.Module) -> None:
    assert [name for name, _ in split.named_parameters()] == [name for name, _ in whole.named_parameters()]
    modules = dict(split.named_modules())
    for name, expected in whole.named_parameters():
        got = split.get_parameter(name)
        assert got.requires_grad == expected.requires_grad, name
        if not expected.requires_grad:
            continue
        path, _, leaf = name.rpartition(".")
        cut = getattr(modules[path], "split", None)
        is_cut = cut is not None and not (leaf == "bias" and isinstance(modules[path], RowParallelLinear))
        gradient = cut.gather(got.grad, axis()) if is_cut else got.grad
        close(gradient, expected.grad, msg=lambda text, name=name: f"{name}: {text}")


@on_ranks
def test_column_and_row_around_any_module(rank: int) -> None:
    x_BTC = normal(2, 8, 6)
    whole, y, gradient = reference_net(x_BTC)
    net = Net()
    swap(
        net,
        {
            "up": partial(ColumnParallelLinear.from_linear, axis=axis(), groups=2),
            "down": partial(RowParallelLinear.from_linear, axis=axis()),
            "out": partial(ColumnParallelLinear.from_linear, axis=axis(), gather_output=True),
        },
    )
    assert net.up.weight.shape == (6, 6)
    leaf = x_BTC.clone().requires_grad_()
    out = net(leaf)
    close(out, y)
    out.sin().sum().backward()
    close(leaf.grad, gradient)
    assert_gradients(whole, net)


@on_ranks
def test_sequence_parallel_around_any_module(rank: int) -> None:
    x_BTC = normal(2, 8, 6)
    whole, y, gradient = reference_net(x_BTC)
    net = Net()
    swap(
        net,
        {
            "up": partial(ColumnParallelLinear.from_linear, axis=axis(), groups=2, sequence_dim=1),
            "down": partial(RowParallelLinear.from_linear, axis=axis(), sequence_dim=1),
            "out": partial(ColumnParallelLinear.from_linear, axis=axis(), sequence_dim=1, gather_output=True),
        },
    )
    leaf = share(x_BTC, rank, 1).clone().requires_grad_()
    out = net(leaf)
    close(out, y)
    out.sin().sum().backward()
    close(leaf.grad, share(gradient, rank, 1))
    replicated = [p.grad for p in (net.norm.weight, net.norm.bias, net.down.bias)]
    with pytest.raises(AssertionError, match=r"down\.bias"):
        assert_gradients(whole, net)
    synchronize_replicated_gradients(replicated, axis())
    assert_gradients(whole, net)


@on_ranks
def test_row_parallel_can_split_its_input(rank: int) -> None:
    whole = nn.Linear(12, 5, dtype=torch.float64)
    with torch.no_grad():
        for i, p in enumerate(whole.parameters()):
            p.copy_(normal(*p.shape, seed=i))
    split = RowParallelLinear.from_linear(whole, axis(), split_input=True)
    x, x2 = (normal(3, 12).requires_grad_() for _ in range(2))
    close(split(x2), whole(x))
    whole(x).square().sum().backward()
    whole_weight_grad = whole.weight.grad
    split(x2).square().sum().backward()
    close(x2.grad, x.grad)
    close(split.split.gather(split.weight.grad, axis()), whole_weight_grad)


@on_ranks
def test_what_does_not_divide_names_both_numbers(rank: int) -> None:
    with pytest.raises(ValueError, match="= 4 does not divide the 6 features"):
        RowParallelLinear.from_linear(nn.Linear(6, 8), axis())
    with pytest.raises(ValueError, match="= 4 x groups = 3 does not divide the 18 features"):
        ColumnParallelLinear.from_linear(nn.Linear(8, 18), axis(), groups=3)
    with pytest.raises(ValueError, match=r"= 4 does not divide dim 1 of a tensor \(2, 6\)"):
        scatter_to_region(torch.zeros(2, 6), axis(), dim=1)
    with pytest.raises(ValueError, match="padding_idx"):
        VocabParallelEmbedding.from_embedding(nn.Embedding(8, 2, padding_idx=0), axis())


def test_swap_keeps_ties_and_takes_every_submodule():
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    net[2].weight = net[0].weight
    before = list(net)
    swap(net, {"*": lambda old: nn.Linear(3, 3)})  # not the root, which has no place to be put
    assert all(old is not new for old, new in zip(before, net, strict=True))
    assert net[2].weight is net[0].weight
    assert net[1].weight is not net[0].weight


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("nowhere.*", r"^'nowhere.\*' matches no submodule of Net"),
        ("", r"^'' matches no submodule of Net"),
        ("*", r"^'\*' matches both outer and outer.inner inside of it: name one of them"),
    ],
)
def test_swap_names_a_pattern_that_it_cannot_take(pattern, message):
    net = Net()
    net.outer = nn.Sequential()
    net.outer.inner = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=message):
        swap(net, {pattern: lambda old: old})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (ColumnParallelLinear.from_linear, "ColumnParallelLinear is made from nn.Linear, not from LayerNorm"),
        (RowParallelLinear.from_linear, "RowParallelLinear is made from nn.Linear, not from LayerNorm"),
        (VocabParallelEmbedding.from_embedding, "VocabParallelEmbedding is made from nn.Embedding, not from"),
    ],
)
def test_a_layer_that_cannot_be_split_is_named_and_so_is_its_place(make, message):
    alone = Axis("tp", size=1, rank=0, group=None)
    with pytest.raises(TypeError, match=message) as caught:
        swap(Net(), {"norm": partial(make, axis=alone)})
    assert caught.value.__notes__ == ["where norm of Net was to be replaced"]
