"""Derivatives of derivatives under torchpar's wrappers, on four gloo ranks, in float64.

The oracle is the same module on one rank, over the whole batch.
"""

from functools import partial

import modules
import pytest
import torch
from modules import double, normal, share
from ranks import on_ranks
from torch import nn

from torchpar import FSDP, DataParallel, ShardedOptimizer
from torchpar.measure.memory import resident_bytes

WRAPPERS = {
    "data_parallel": DataParallel,
    "zero3": FSDP,
    "shard_grad_op": partial(FSDP, reshard_after_forward=False),
    "zero2": partial(FSDP, zero=2),
}
each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
assert_same = partial(modules.assert_same, rtol=1e-10, atol=1e-12)


class Critic(nn.Module):
    """A discriminator: layers with a residual stream, weights used twice, one at the top."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=double) for _ in range(4))
        self.norm = nn.LayerNorm(6, dtype=double)
        self.out = nn.Parameter(normal(6, seed=3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[1]):
            x = x + torch.tanh(layer(self.norm(x)))
        return x @ self.out


def penalty(critic: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """WGAN-GP's: of the gradient for the input, each row's its own."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=-1) - 1).square().mean()


def wgan_loss(critic: nn.Module, x: torch.Tensor) -> torch.Tensor:
    # The penalty first: two forwards, one of them without gradients, come before its backward.
    total = 10 * penalty(critic, x)
    with torch.no_grad():
        total = total + critic(x).mean()
    return total + critic(x).mean() - critic(2 * x).mean()


def third_derivative(critic: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    value = critic(x).sum()
    for _ in range(2):
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        value = gradient.square().sum()
    return value / len(x)


def through_parameters_too(critic: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A first backward that leaves gradients on parameters, and a graph on the input's."""
    x = x.clone().requires_grad_()
    critic(x).mean().backward(create_graph=True)
    return x.grad.square().sum(-1).mean()


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, FSDP):
        return model.gather({name: p.grad for name, p in model.pieces.items()})
    return modules.gradients(model.module)


@each_wrapper
@on_ranks
def test_a_gradient_penalty_equals_one_rank(rank: int, wrap) -> None:
    for loss in (wgan_loss, third_derivative):
        critic, model = Critic(), wrap(Critic())
        for step in range(2):  # the second finds nothing left of the first
            x = normal(16, 6, seed=step)
            loss(critic, x).backward()
            loss(model, share(x, rank)).backward()
            model.finish_gradient_synchronization()
            assert_same(whole_gradients(model), modules.gradients(critic))
            critic.zero_grad()
            model.zero_grad()
            if isinstance(model, FSDP) and not any(f.keeps_full for u in model.units for f in u.flats):
                assert resident_bytes(model.transient) == 0


@pytest.mark.filterwarnings("ignore:Using backward")  # of a cycle of references, which ends with the test
@on_ranks
def test_a_backward_of_parameters_that_makes_a_graph(rank: int) -> None:
    x = normal(4, 6)
    for wrap in WRAPPERS.values():
        critic, model = Critic(), wrap(Critic())
        through_parameters_too(critic, x).backward()
        with model.no_sync():
            loss = through_parameters_too(model, x)
        loss.backward()
        model.finish_gradient_synchronization()
        assert_same(whole_gradients(model), modules.gradients(critic))


@on_ranks
def test_a_gradient_penalty_under_the_sharded_optimizer(rank: int) -> None:
    critic, module = Critic(), Critic()
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=1.0, reduce_gradients=True)
    x = normal(16, 6)
    wgan_loss(critic, x).backward()
    wgan_loss(module, share(x, rank)).backward()
    optimizer.finish_gradient_synchronization()
    optimizer.step()
    torch.optim.SGD(critic.parameters(), lr=1.0).step()
    assert_same(module.state_dict(), critic.state_dict())
