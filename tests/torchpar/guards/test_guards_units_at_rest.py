"""A unit is sharded again when backward ends, whatever the loop around it does.

Each of these loops trained something else, or nothing, without a word. On four gloo ranks.
"""

import modules
import pytest
from loops import AdamW, assert_same, assert_same_weights, each_way, finish
from modules import normal, share, stack
from ranks import on_ranks
from torch import nn

from torchpar import FSDP


@each_way
@on_ranks
def test_what_was_frozen_for_one_backward_has_gradients_in_the_next(rank: int, options: dict) -> None:
    for units in (None, ()):
        reference, module = stack(3), stack(3)
        sharded = FSDP(module, units=units, **options)
        x = normal(8, 16)
        for each, part in ((reference, x), (sharded, share(x, rank))):
            each.requires_grad_(False)
            each(part.clone().requires_grad_()).square().mean().backward()
            assert all(p.dim() == 1 for p in sharded.parameters())  # at rest
            each.requires_grad_(True)
            each(part).square().mean().backward()
        sharded.finish_gradient_synchronization()
        whole = sharded.gather({name: p.grad for name, p in sharded.pieces.items()})
        assert_same(whole, modules.gradients(reference))


def discriminator() -> nn.Sequential:
    return nn.Sequential(*(layer for linear in stack(3) for layer in (linear, nn.Tanh())))


def train_gan(
    generator: nn.Module, judge: nn.Module, noise: list, real: list, *, freezes: bool, to_none: bool
) -> None:
    """The loop that everybody writes: each optimizer drops what the other's backward left."""
    for_generator, for_judge = AdamW(generator.parameters()), AdamW(judge.parameters())
    for z, x in zip(noise, real, strict=True):
        for_judge.zero_grad(set_to_none=to_none)
        loss = (judge(x) - 1).square().mean() + judge(generator(z).detach()).square().mean()
        loss.backward()
        finish(judge)
        for_judge.step()
        for_generator.zero_grad(set_to_none=to_none)
        if freezes:
            judge.requires_grad_(False)
        (judge(generator(z)) - 1).square().mean().backward()
        if freezes:
            judge.requires_grad_(True)
        finish(generator)
        for_generator.step()


@each_way
@on_ranks
def test_a_gan_trains_as_without_sharding(rank: int, options: dict) -> None:
    noise, real = ([normal(8, 16, seed=s + step) for step in range(3)] for s in (0, 10))
    parts = [[share(x, rank) for x in batches] for batches in (noise, real)]
    for freezes in (True, False):
        alone = stack(2), discriminator()
        train_gan(*alone, noise, real, freezes=freezes, to_none=True)
        sharded = tuple(FSDP(module, **options) for module in (stack(2), discriminator()))
        train_gan(*sharded, *parts, freezes=freezes, to_none=True)
        for each, reference in zip(sharded, alone, strict=True):
            assert_same_weights(each, reference)


@on_ranks
def test_gradients_set_to_zero_while_others_are_on_their_way(rank: int) -> None:
    batches = [[normal(8, 16, seed=step)] * 2 for step in range(2)]
    sharded = tuple(FSDP(module) for module in (stack(2), discriminator()))
    with pytest.raises(RuntimeError, match=r"\d\.\w+ was changed .* finish_gradient_synchronization\(\)"):
        train_gan(*sharded, *batches, freezes=False, to_none=False)
