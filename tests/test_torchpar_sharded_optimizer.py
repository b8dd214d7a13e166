"""torchpar.manual.ShardedOptimizer around optimizers of all kinds, on four gloo ranks, in float64.

The oracle is the same module on one rank, over the whole batch, with PyTorch's own optimizer.
"""

import copy
import doctest
from collections.abc import Callable
from functools import partial

import modules
import pytest
import torch
from modules import Odd, double, ids, share
from ranks import RANKS, on_ranks
from torch import nn

from torchpar.collectives import Axis
from torchpar.manual.data_parallel import DataParallel
from torchpar.manual.fully_sharded import FSDP
from torchpar.manual.sharded_optimizer import ShardedOptimizer
from torchpar.memory import resident_bytes
from torchpar.traffic import Call

# Averages of four partial means in another order than one mean over all: a few units in the last place,
# which Adam's division by a gradient's own size makes a little larger.
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}
close = partial(torch.testing.assert_close, **TOLERANCE)


def optimizers(
    module: nn.Module, *, reduces: bool, make: type[torch.optim.Optimizer] = torch.optim.AdamW, **kwargs
) -> tuple[nn.Module, ShardedOptimizer, Callable[[], None]]:
    """A ShardedOptimizer that reduces gradients itself or behind a DataParallel, and what reduces them."""
    if reduces:
        optimizer = ShardedOptimizer(module.parameters(), make, reduce_gradients=True, **kwargs)
        return module, optimizer, optimizer.finish_gradient_synchronization
    replicas = DataParallel(module)
    optimizer = ShardedOptimizer(module.parameters(), make, **kwargs)
    return replicas, optimizer, replicas.finish_gradient_synchronization


def assert_same_weights(module: nn.Module, reference: nn.Module) -> None:
    modules.assert_same(dict(module.named_parameters()), dict(reference.named_parameters()), **TOLERANCE)


@on_ranks
def test_sharded_optimizer_with_schedule_and_later_group(rank: int) -> None:
    for reduces in (False, True):
        reference, module = Odd(), Odd()
        late = [nn.Parameter(torch.ones(5, dtype=double)) for _ in range(2)]
        replicas, optimizer, reduce = optimizers(module, reduces=reduces, lr=1e-2)
        alone = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        schedules = [torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.5) for o in (alone, optimizer)]
        for step in range(4):
            if step == 2:
                for each, extra in zip((alone, optimizer), late, strict=True):
                    each.add_param_group(
                        {"params": [extra], "lr": 0.3, "weight_decay": 0.0, "initial_lr": 1.0}
                    )
            reference(ids(step)).backward()
            replicas(share(ids(step), rank)).backward()
            for extra in late:
                extra.square().sum().backward()
            reduce()
            for each in (alone, optimizer, *schedules):
                each.step()
            for each in (alone, optimizer):
                each.zero_grad()
            for extra in late:
                extra.grad = None
        assert optimizer.param_groups[0]["lr"] == 1e-2 / 16
        assert_same_weights(module, reference)
        close(late[1], late[0])
        state = resident_bytes(t for entry in optimizer.state.values() for t in entry.values() if t.dim())
        whole = 2 * sum(p.nbytes for p in [*reference.parameters(), late[0]] if p.requires_grad)
        assert sum(Axis.of(None).all_gather_objects(state)) == whole


@on_ranks
def test_sharded_optimizer_resumes_from_its_state(rank: int) -> None:
    for reduces in (False, True):
        reference, module = Odd(), Odd()
        alone = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.3)
        replicas, optimizer, reduce = optimizers(module, reduces=reduces, lr=1e-2, weight_decay=0.3)
        for step in range(4):
            if step == 2:  # go on in a new module and optimizer
                saved = copy.deepcopy(optimizer.state_dict())
                module = Odd(seed=1)
                module.load_state_dict(reference.state_dict())
                replicas, optimizer, reduce = optimizers(module, reduces=reduces, lr=9.0)
                optimizer.load_state_dict(saved)
                assert optimizer.param_groups[0]["weight_decay"] == 0.3
                wrong = {**saved, "shard": {"rank": rank, "size": RANKS + 1}}
                with pytest.raises(ValueError, match="cannot be loaded into"):
                    optimizer.load_state_dict(wrong)
            reference(ids(step)).backward()
            replicas(share(ids(step), rank)).backward()
            reduce()
            for each in (alone, optimizer):
                each.step()
                each.zero_grad()
        assert_same_weights(module, reference)


@on_ranks
def test_sharded_optimizer_of_any_class(rank: int) -> None:
    choices = [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.RMSprop, {"lr": 1e-2}),
        (torch.optim.NAdam, {"lr": 1e-2}),
        (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    ]
    for make, options in choices:
        for reduces in (False, True):
            reference, module = Odd(), Odd()
            alone = make(reference.parameters(), **options)
            replicas, optimizer, reduce = optimizers(module, reduces=reduces, make=make, **options)
            for step in range(3):

                def closure(step=step, replicas=replicas, reduce=reduce) -> torch.Tensor:
                    loss = replicas(share(ids(step), rank))
                    loss.backward()
                    reduce()
                    return loss

                reference(ids(step)).backward()
                alone.step()
                assert optimizer.step(closure) is not None
                alone.zero_grad()
                optimizer.zero_grad()
            assert_same_weights(module, reference)


@on_ranks
def test_sharded_optimizer_clips_by_the_global_norm(rank: int) -> None:
    reference, module = Odd(), Odd()
    axis = Axis.of(None)
    optimizer = ShardedOptimizer(
        module.parameters(), torch.optim.SGD, lr=0.1, group=axis, reduce_gradients=True
    )
    axis.traffic.clear()
    for _ in range(2):  # accumulates, and reduces once
        reference(ids()).backward()
        module(share(ids(), rank)).backward()
    optimizer.finish_gradient_synchronization()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 1e-2)
    close(optimizer.clip_grad_norm_(1e-2).double(), norm.double(), rtol=1e-6)
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    optimizer.step()
    assert_same_weights(module, reference)
    trainable = sum(p.nbytes for p in reference.parameters() if p.requires_grad)
    assert axis.traffic.bytes[Call("reduce_scatter", "world", "gradients")] == trainable


@on_ranks
def test_the_examples_run(rank: int) -> None:
    for example in (FSDP, ShardedOptimizer):
        names = {"torch": torch, "nn": nn, "DataParallel": DataParallel, example.__name__: example}
        for test in doctest.DocTestFinder(recurse=False).find(example, globs=names):
            assert len(test.examples) > 3
            result = doctest.DocTestRunner().run(test)
            assert result.failed == 0


@pytest.mark.parametrize("make", [FSDP, lambda m: ShardedOptimizer(m.parameters(), torch.optim.SGD, lr=1.0)])
def test_without_a_process_group_it_says_so(make):
    with pytest.raises(ValueError, match="init_process_group"):
        make(nn.Linear(1, 1))
