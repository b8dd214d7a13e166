"""Optimizers and wrappers that do not know of each other.

Each of these loops trained something else, or nothing, without a word. On four gloo ranks.
"""

from collections.abc import Callable

import pytest
import torch
from loops import assert_same
from modules import normal, stack
from ranks import on_ranks
from torch import nn

from torchpar import FSDP, DataParallel, ShardedOptimizer


@on_ranks
def test_an_optimizer_over_parameters_that_nobody_updates_is_an_error(rank: int) -> None:
    module = stack(2)
    early = torch.optim.SGD(module.parameters(), lr=0.1)
    sharded = FSDP(module)
    sharded(normal(4, 16)).sum().backward()
    sharded.finish_gradient_synchronization()
    with pytest.raises(RuntimeError, match=r"0\.weight as it was before FSDP.*over parameters\(\)"):
        early.step()
    module = stack(2)
    early = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer = ShardedOptimizer(module.named_parameters(), torch.optim.SGD, lr=0.1, reduce_gradients=True)
    module(normal(4, 16)).sum().backward()
    optimizer.finish_gradient_synchronization()
    with pytest.raises(RuntimeError, match=r"gradients of 0\.weight go to a ShardedOptimizer"):
        early.step()
    del optimizer  # and its hooks: the module is nobody's
    early.step()


def reducing(module: nn.Module) -> ShardedOptimizer:
    return ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1, reduce_gradients=True)


def behind_replicas(module: nn.Module) -> ShardedOptimizer:
    return ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (FSDP, FSDP),
        (FSDP, DataParallel),
        (FSDP, behind_replicas),
        (FSDP, reducing),
        (DataParallel, DataParallel),
        (DataParallel, FSDP),
        (DataParallel, reducing),
        (reducing, DataParallel),
        (reducing, FSDP),
        (reducing, reducing),
    ],
)
@on_ranks
def test_two_that_would_synchronise_the_same_gradients(rank: int, first: Callable, second: Callable) -> None:
    module = stack(2)
    before = {name: p.clone() for name, p in module.named_parameters()}
    wrapped = first(module)
    with pytest.raises(ValueError, match=r"already synchronised by an? (FSDP|DataParallel|ShardedOptimizer)"):
        second(module)
    weights = wrapped.full_state_dict() if isinstance(wrapped, FSDP) else dict(module.named_parameters())
    assert_same(weights, before)
