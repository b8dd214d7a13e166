"""Passes that end in other ways: given up, with a penalty, with layers that came later.

Each of these loops trained something else, or nothing, without a word. On four gloo ranks.
"""

import pytest
import torch
from loops import AdamW, assert_same, assert_same_weights, each_way, finish, train
from modules import double, normal, share, stack
from ranks import on_ranks
from torch import nn

from torchpar import FSDP, DataParallel


@each_way
@on_ranks
def test_passes_that_are_given_up_leave_nothing_behind(rank: int, options: dict) -> None:
    class Fails(nn.Module):
        fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fails:
                raise KeyboardInterrupt if self.fails == "interrupt" else ValueError
            if x.requires_grad:
                x.register_hook(self.backward)
            return x

        def backward(self, gradient: torch.Tensor) -> None:
            if self.breaks:
                raise ValueError

        breaks = False

    reference, module, middle = stack(2), stack(2), Fails()
    alone = AdamW(reference.parameters())
    sharded = FSDP(nn.Sequential(module[0], middle, module[1]), **options)
    optimizer = AdamW(sharded.parameters())
    x = normal(8, 16)
    for step in range(2):
        sharded(100 * x)  # no backward
        with torch.no_grad():
            sharded(100 * x)
        with torch.inference_mode():
            sharded(100 * x)
        for middle.fails in (True, "interrupt"):
            with pytest.raises((ValueError, KeyboardInterrupt)):
                sharded(100 * x)
            assert all(p.dim() == 1 for p in sharded.parameters())  # shown at rest
        middle.fails, middle.breaks = False, True
        with pytest.raises(ValueError, match=r"^$"):
            sharded(100 * x).sum().backward()
        middle.breaks = False
        optimizer.zero_grad() if step else sharded.zero_grad()
        train(reference, alone, x, steps=1)
        train(sharded, optimizer, share(x, rank), reduce=sharded.finish_gradient_synchronization, steps=1)
    weights = {name.replace("2.", "1."): weight for name, weight in sharded.full_state_dict().items()}
    assert_same(weights, dict(reference.named_parameters()))


@each_way
@on_ranks
def test_a_penalty_on_the_pieces_themselves(rank: int, options: dict) -> None:
    x = normal(8, 16)
    reference, sharded = stack(2), FSDP(stack(2), **options)
    alone, optimizer = AdamW(reference.parameters()), AdamW(sharded.parameters())
    for step in range(2):
        for each, part in ((reference, x), (sharded, share(x, rank))):
            for passed in range(2):  # adds to what awaits its gradient
                penalty = sum(p.square().sum() for p in each.parameters())
                (each(part).square().mean() + penalty).backward()
                if passed and step:
                    sum(p.pow(4).sum() for p in each.parameters()).backward()
            finish(each)
        for each in (alone, optimizer):
            each.step()
            each.zero_grad()
    assert_same_weights(sharded, reference)


class Head(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) if hasattr(self, "head") else x


@on_ranks
def test_layers_that_come_after_wrapping(rank: int) -> None:
    x = normal(8, 16)
    sharded = FSDP(nn.Sequential(*stack(2), Head()))
    sharded(x)
    sharded.module[2].head = nn.Tanh()
    sharded(x)  # without parameters it may
    sharded.module[2].head = nn.Linear(16, 16, dtype=double)
    with pytest.raises(RuntimeError, match=r"2\.head\.weight has come since FSDP"):
        sharded(x)
    module = nn.Sequential(*stack(2), Head())
    replicas = DataParallel(module)
    replicas(x)
    torch.manual_seed(rank)
    module[2].head = nn.Linear(16, 16, dtype=double)
    replicas(x)
    torch.manual_seed(0)
    assert torch.equal(module[2].head.weight, nn.Linear(16, 16, dtype=double).weight)
