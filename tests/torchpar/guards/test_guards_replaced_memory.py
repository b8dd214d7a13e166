"""Parameters whose memory was replaced are trained, or refused.

Each of these loops trained something else, or nothing, without a word. On four gloo ranks.
"""

import modules
import pytest
import torch
from loops import AdamW, assert_same, assert_same_weights, close, each_way, train
from modules import double, normal, share, stack
from ranks import on_ranks
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from torchpar import FSDP, DataParallel, ShardedOptimizer


def through_another_dtype(module: nn.Module) -> None:
    module.to(torch.float32).to(double)


def through_a_vector(module: nn.Module) -> None:
    """Twice what they were."""
    vector_to_parameters(2 * parameters_to_vector(module.parameters()), module.parameters())


def new_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * 0.5


REPLACEMENTS = (through_another_dtype, through_a_vector, new_data)


@each_way
@on_ranks
def test_sharded_parameters_with_new_memory_are_trained(rank: int, options: dict) -> None:
    x = normal(8, 16)
    for replace in REPLACEMENTS:
        reference, sharded = stack(2), FSDP(stack(2), **options)
        alone, optimizer = AdamW(reference.parameters()), AdamW(sharded.parameters())
        for _ in range(2):
            train(reference, alone, x)
            train(sharded, optimizer, share(x, rank), reduce=sharded.finish_gradient_synchronization)
            for module in (reference, sharded):
                replace(module)
        close(sharded(x), reference(x))
        assert_same_weights(sharded, reference)
        replace(sharded)
        sharded.load_full_state_dict(reference.state_dict())  # which is newer than the new memory
        assert_same_weights(sharded, reference)


@on_ranks
def test_an_optimizer_shares_out_parameters_with_new_memory(rank: int) -> None:
    x = normal(8, 16)
    for reduces in (False, True):
        for replace in REPLACEMENTS:
            reference, module = stack(2), stack(2)
            alone = AdamW(reference.parameters())
            replicas = module if reduces else DataParallel(module)
            optimizer = ShardedOptimizer(
                module.parameters(), torch.optim.AdamW, lr=1e-2, reduce_gradients=reduces
            )
            reducer = optimizer if reduces else replicas
            for _ in range(2):
                train(reference, alone, x)
                train(replicas, optimizer, share(x, rank), reduce=reducer.finish_gradient_synchronization)
                for each in (reference, module):
                    replace(each)
            assert_same(dict(module.named_parameters()), dict(reference.named_parameters()))


@on_ranks
def test_parameters_of_another_dtype_or_shape_are_refused(rank: int) -> None:
    x = normal(4, 16)
    sharded = FSDP(stack(2))
    sharded.float()
    with pytest.raises(RuntimeError, match=r"1\.weight is \(\d+,\) torch.float32 .* and was .*float64"):
        sharded(x.float())
    module = stack(2)
    optimizer = ShardedOptimizer(module.named_parameters(), torch.optim.SGD, lr=0.1, reduce_gradients=True)
    module.float()
    module(x.float()).sum().backward()
    optimizer.finish_gradient_synchronization()
    with pytest.raises(RuntimeError, match=r"1\.bias is \(16,\) torch.float32 .* and was .*float64"):
        optimizer.step()


@on_ranks
def test_replicas_follow_parameters_of_another_dtype_or_shape(rank: int) -> None:
    x = normal(8, 16)
    reference, module = stack(3), stack(3)
    replicas = DataParallel(module)
    for each, part in ((reference, x), (replicas, share(x, rank))):
        layer = each.module[1] if each is replicas else each[1]
        each(part)
        layer.weight.data = layer.weight.data[:8].clone()
        layer.bias.data = layer.bias.data[:8].clone()
        after = each.module[2] if each is replicas else each[2]
        after.weight.data = after.weight.data[:, :8].clone()
        each(part).square().mean().backward()
    replicas.finish_gradient_synchronization()
    assert_same(modules.gradients(module), modules.gradients(reference))


@each_way
@on_ranks
def test_parameters_replaced_by_others_are_refused(rank: int, options: dict) -> None:
    x = normal(4, 16)
    sharded = FSDP(stack(2), **options)
    pieces = {name: piece.detach().clone() for name, piece in sharded.named_parameters()}
    sharded.load_state_dict(pieces, assign=True)
    with pytest.raises(RuntimeError, match=r"0\.weight .*replaced.*assign"):
        sharded(x)
    sharded = FSDP(stack(2), **options)
    sharded.module[1].bias = None
    with pytest.raises(RuntimeError, match=r"1\.bias .*replaced"):
        sharded(x)
