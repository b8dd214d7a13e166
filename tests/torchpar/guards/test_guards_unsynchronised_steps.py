"""No step with gradients that are not synchronised.

Each of these loops trained something else, or nothing, without a word. On four gloo ranks.
"""

import copy

import pytest
import torch
from loops import AdamW, assert_same_weights, each_way, no_finish
from modules import normal, share, stack
from ranks import on_ranks

from torchpar import FSDP, DataParallel, ShardedOptimizer
from torchpar.comm.collectives import Axis
from torchpar.guards.flat_parameters import flatten_parameters
from torchpar.guards.flat_steps import FlatSteps
from torchpar.manual.fully_sharded import finish_mean, reduce_scatter_gradients


@each_way
@on_ranks
def test_a_step_before_sharded_gradients_are_there_is_an_error(rank: int, options: dict) -> None:
    for quiet in (False, True):
        for more in ({}, {"find_unused_parameters": True}):
            reference, sharded = stack(2), FSDP(stack(2), **options, **more)
            optimizer = AdamW(sharded.parameters(), fused=True)
            with sharded.no_sync() if quiet else torch.enable_grad():
                sharded(share(normal(8, 16), rank)).square().mean().backward()
            with no_finish():
                sharded.clip_grad_norm_(1.0)
            with no_finish():
                optimizer.step()
            with no_finish():  # nothing was lost
                optimizer.step()
            sharded.finish_gradient_synchronization()
            sharded.finish_gradient_synchronization()  # which changes nothing
            optimizer.step()
            reference(normal(8, 16)).square().mean().backward()
            AdamW(reference.parameters()).step()
            assert_same_weights(sharded, reference)


@each_way
@on_ranks
def test_weights_updated_by_hand_before_their_gradients_are_there(rank: int, options: dict) -> None:
    sharded = FSDP(stack(2), **options)
    sharded(normal(4, 16)).sum().backward()
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter -= 0.1
    with no_finish(match=r"1\.weight, or .* changed before .*finish_gradient_synchronization\(\)"):
        sharded(normal(4, 16))


@each_way
@on_ranks
def test_a_closure_that_does_not_finish_is_an_error(rank: int, options: dict) -> None:
    sharded = FSDP(stack(2), **options)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        loss = sharded(normal(4, 16)).sum()
        loss.backward()
        return loss

    with no_finish():
        optimizer.step(closure)


@pytest.mark.parametrize("sync", ["naive", "flat", "overlapped", "bucketed"])
@on_ranks
def test_a_step_of_a_replica_with_gradients_of_its_own_is_an_error(rank: int, sync) -> None:
    for quiet in (False, True):
        module = stack(2)
        replicas = DataParallel(module, gradient_sync=sync)
        for make in (AdamW, lambda params: ShardedOptimizer(params, torch.optim.SGD, lr=0.1)):
            optimizer = make(module.parameters())
            with replicas.no_sync() if quiet else torch.enable_grad():
                replicas(share(normal(8, 16), rank)).sum().backward()
            before = module[0].weight.clone()
            with no_finish():
                optimizer.step()
            assert torch.equal(module[0].weight, before)
            replicas.zero_grad()
            optimizer.step()  # without gradients, nothing
            with replicas.no_sync():
                replicas(share(normal(8, 16), rank)).sum().backward()
            optimizer.zero_grad()
            optimizer.step()  # dropped by hand: nothing either
            replicas(share(normal(8, 16), rank)).sum().backward()
            replicas.finish_gradient_synchronization()
            optimizer.step()
            replicas.zero_grad()


@on_ranks
def test_a_step_before_a_sharded_optimizer_has_its_gradients_is_an_error(rank: int) -> None:
    module = stack(2)
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1, reduce_gradients=True)
    module(normal(4, 16)).sum().backward()
    with no_finish():
        optimizer.clip_grad_norm_(1.0)
    with no_finish():
        optimizer.step()
    optimizer.finish_gradient_synchronization()
    optimizer.step()
    module.zero_grad()  # which does not reach the pieces' gradients
    with pytest.raises(RuntimeError, match=r"gradients of the last step .* optimizer's zero_grad\(\)"):
        module(normal(4, 16)).sum().backward()
    optimizer.zero_grad()
    module(normal(4, 16)).sum().backward()


def test_a_deep_copy_of_what_guards_steps_guards_the_copy():
    alone = Axis("world", size=1, rank=0, group=None)
    flats = flatten_parameters(list(stack(1).named_parameters()), alone)
    (original,) = flats
    (flat,), _guard = copy.deepcopy((flats, FlatSteps(flats)))
    optimizer = AdamW(flat.pieces, fused=True)
    flat.parameters[0].grad = torch.ones_like(flat.parameters[0])
    flat.gradients.add(0)
    with no_finish():
        optimizer.step()
    reduce_scatter_gradients(flat.gradients)
    finish_mean(flat.gradients)
    optimizer.step()
    assert flat.is_changed
    assert not original.is_changed
