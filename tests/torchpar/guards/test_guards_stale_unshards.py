"""The unsharded weights are those that the optimizer made.

Each of these loops trained something else, or nothing, without a word. On four gloo ranks.
"""

from functools import partial

import pytest
import torch
from loops import OPTIMIZERS, UNITS, AdamW, assert_same_weights, close, each_way, finish
from modules import Odd, ids, normal, share, stack
from ranks import on_ranks
from torch import nn

from torchpar import FSDP


@each_way
@pytest.mark.parametrize("units", UNITS)
@on_ranks
def test_a_forward_before_the_step_leaves_nothing_stale(rank: int, units: str, options: dict) -> None:
    for make in OPTIMIZERS.values():
        reference, module = Odd(), Odd()
        sharded = FSDP(module, units=UNITS[units](module), **options)
        both = [(reference, ids), (sharded, lambda step: share(ids(step), rank))]
        optimizers = [make(each.parameters()) for each, _ in both]
        for step in range(2):
            for (each, batch), optimizer in zip(both, optimizers, strict=True):
                each(batch(step)).backward()
                finish(each)
                each(ids(7))  # with gradients, for a metric
                optimizer.step()
                optimizer.zero_grad()
            close(sharded(ids(8)), reference(ids(8)))
        assert_same_weights(sharded, reference)


def everything_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The names of a `state_dict()`, which an FSDP has not."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


@each_way
@on_ranks
def test_weights_written_while_they_are_gathered(rank: int, options: dict) -> None:
    for write in (
        lambda module: module.load_state_dict({name: t + 1 for name, t in everything_of(module)}),
        lambda module: [nn.init.constant_(p, 0.1) for p in module.parameters()],
    ):
        reference, module = Odd(), Odd()
        sharded = FSDP(module, **options)
        for each in (reference, sharded):
            each(ids())
            write(each)
        close(sharded(ids(1)), reference(ids(1)))


@each_way
@on_ranks
def test_evaluations_see_what_averages_of_weights_wrote_past_all_versions(rank: int, options: dict) -> None:
    """Why zero=2, too, gathers for each of them: nothing tells of a write through `data`."""
    reference, module = Odd(), Odd()
    sharded = FSDP(module, **options)
    with torch.no_grad():
        for each in (reference, sharded):
            each(ids())
            for parameter in each.parameters():
                parameter.data.mul_(0.5)
        close(sharded(ids(1)), reference(ids(1)))


@each_way
@on_ranks
def test_a_step_between_forward_and_backward_is_an_error_as_without_sharding(
    rank: int, options: dict
) -> None:
    for wrap in (lambda module: module, partial(FSDP, **options)):
        module = wrap(stack(2))
        optimizer = AdamW(module.parameters(), foreach=True)
        module(normal(4, 16)).sum().backward()
        finish(module)
        loss = module(normal(4, 16)).sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"modified by an inplace|changed between this forward"):
            loss.backward()
