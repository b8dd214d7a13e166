"""torchpar.manual.ShardedOptimizer around optimizers of all kinds, on four gloo ranks, in float64.

The oracle is the same module on one rank, over the whole batch, with PyTorch's own optimizer.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import modules
import pytest
import torch
from modules import Odd, double, ids, share
from ranks import RANKS, on_ranks
from torch import nn

from torchpar import FSDP, DataParallel, ShardedOptimizer
from torchpar.comm.collectives import Axis
from torchpar.comm.counter import Call
from torchpar.measure.memory import resident_bytes

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
def test_gradients_leave_in_buckets_during_backward(rank: int) -> None:
    for use_no_sync in (True, False):
        reference, module = Odd(), Odd()
        axis = Axis.of(None)
        optimizer = ShardedOptimizer(
            module.named_parameters(),
            torch.optim.AdamW,
            lr=1e-2,
            group=axis,
            reduce_gradients=True,
            bucket_size_mb=2e-4,
        )
        alone = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        reduce_scatters = Call("reduce_scatter", "world", "gradients")
        for _ in range(2):
            axis.traffic.clear()
            for each, x in ((reference, ids()), (module, share(ids(), rank))):
                for last in (False, True):
                    with nullcontext() if last or not use_no_sync else optimizer.no_sync():
                        each(x).div(2).backward()
                    if use_no_sync and not last:
                        assert not axis.traffic.calls
            in_backward = axis.traffic.calls[reduce_scatters]
            assert in_backward > 1
            with pytest.raises(RuntimeError, match=r"call finish_gradient_synchronization\(\) before step"):
                optimizer.step()
            optimizer.finish_gradient_synchronization()
            trainable = sum(
                p.nbytes for p in reference.parameters() if p.requires_grad and p.grad is not None
            )
            assert not use_no_sync or axis.traffic.bytes[reduce_scatters] == trainable
            for each in (alone, optimizer):
                each.step()
                each.zero_grad()
        assert_same_weights(module, reference)
        state = optimizer.state_dict()
        with pytest.raises(ValueError, match="cannot be loaded into"):
            optimizer.load_state_dict({**state, "shard": {**state["shard"], "bucket_size_mb": 25.0}})


@on_ranks
def test_a_step_that_is_given_up_while_buckets_are_under_way(rank: int) -> None:
    reference, module = Odd(), Odd()
    options = {"reduce_gradients": True, "bucket_size_mb": 2e-4}
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1, **options)
    module(share(ids(), rank)).mul(100).backward()
    optimizer.zero_grad()
    reference(ids()).backward()
    module(share(ids(), rank)).backward()
    optimizer.finish_gradient_synchronization()
    for each in (torch.optim.SGD(reference.parameters(), lr=0.1), optimizer):
        each.step()
    assert_same_weights(module, reference)


@pytest.mark.parametrize(
    "options", [{"bucket_size_mb": 1.0}, {"bucket_size_mb": 0, "reduce_gradients": True}]
)
def test_buckets_that_nothing_would_fill_are_refused(options):
    with pytest.raises(ValueError, match="positive, and with reduce_gradients=True"):
        ShardedOptimizer(nn.Linear(1, 1).parameters(), torch.optim.SGD, lr=1.0, **options)


class Branches(nn.Module):
    """Linear layers of which the second is used or not, and the third never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(3, 3, dtype=double) for _ in range(3))

    def forward(self, x: torch.Tensor, use: bool = True) -> torch.Tensor:
        x = self.first(x)
        return (self.second(x) if use else x).square().mean()


def batch(rows: int = RANKS) -> torch.Tensor:
    return torch.linspace(-1, 1, 3 * rows, dtype=double).view(rows, 3)


@on_ranks
def test_a_parameter_that_some_ranks_do_not_use(rank: int) -> None:
    for users in ((0,), (1, 2, 3), ()):
        reference, module = Branches(), Branches()
        options = {"make": torch.optim.SGD, "lr": 1.0, "find_unused_parameters": True}
        _, optimizer, reduce = optimizers(module, reduces=True, **options)
        alone = torch.optim.SGD(reference.parameters(), lr=1.0)
        for _ in range(2):
            sum(reference(row, r in users) for r, row in enumerate(batch())).div(RANKS).backward()
            module(batch()[rank], rank in users).backward()
            reduce()
            for each in (alone, optimizer):
                each.step()
                each.zero_grad()
        assert_same_weights(module, reference)


@on_ranks
def test_unfreezing_after_construction(rank: int) -> None:
    for reduces in (False, True):
        reference, module = Branches(), Branches()
        module.first.requires_grad_(False)
        replicas, optimizer, reduce = optimizers(module, reduces=reduces, make=torch.optim.SGD, lr=1.0)
        module.first.requires_grad_(True)
        module.third.requires_grad_(False)
        reference(batch()).backward()
        replicas(share(batch(), rank)).backward()
        reduce()
        optimizer.step()
        torch.optim.SGD(reference.parameters(), lr=1.0).step()
        assert_same_weights(module, reference)


@on_ranks
def test_zero_grad_of_a_skipped_step_and_to_zeros(rank: int) -> None:
    for reduces in (False, True):
        for to_none in (True, False):
            reference, module = Branches(), Branches()
            options = {"make": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
            replicas, optimizer, reduce = optimizers(module, reduces=reduces, **options)
            alone = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
            module.third.requires_grad_(False)
            if reduces:
                (100 * replicas(batch())).backward()
                optimizer.zero_grad(set_to_none=to_none)
            for _ in range(2):
                reference(batch()).backward()
                replicas(share(batch(), rank)).backward()
                reduce()
                for each in (alone, optimizer):
                    each.step()
                    each.zero_grad(set_to_none=to_none)
            for each in (alone, optimizer):
                each.step()  # zeros are gradients, with which momentum goes on
            assert_same_weights(module, reference)


@on_ranks
def test_calls_that_cannot_be_meant_say_what_to_call(rank: int) -> None:
    module = Branches()
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=1.0, reduce_gradients=True)
    assert optimizer.clip_grad_norm_(1.0) == 0.0  # nothing to clip
    module(batch()).backward()
    with pytest.raises(RuntimeError, match=r"call finish_gradient_synchronization\(\) before step"):
        optimizer.step()
    plain = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=1.0)
    for call in (plain.finish_gradient_synchronization, partial(plain.clip_grad_norm_, 1.0)):
        with pytest.raises(RuntimeError, match="make it with reduce_gradients=True"):
            call()
    sparse = nn.Embedding(5, 3, sparse=True)
    sentence = "weight has a sparse gradient: use a dense embedding"
    named = ShardedOptimizer(sparse.named_parameters(), torch.optim.SGD, lr=1.0)
    sparse(torch.arange(3)).sum().backward()
    with pytest.raises(RuntimeError, match=sentence):
        named.step()
    reducing = ShardedOptimizer(sparse.named_parameters(), torch.optim.SGD, lr=1.0, reduce_gradients=True)
    with pytest.raises(RuntimeError, match=sentence):
        sparse(torch.arange(3)).sum().backward()
    del reducing  # held up to here: what nobody holds reduces nothing


@on_ranks
def test_names_of_parameters_are_in_the_state(rank: int) -> None:
    module = Branches()
    optimizer = ShardedOptimizer(module.named_parameters(), torch.optim.AdamW, lr=0.1)
    alone = torch.optim.AdamW(module.named_parameters(), lr=0.1)
    saved = optimizer.state_dict()
    assert saved["param_groups"] == alone.state_dict()["param_groups"]
    assert saved["param_groups"][0]["param_names"][0] == "first.weight"
    optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["param_groups"] == saved["param_groups"]


@pytest.mark.parametrize("make", [FSDP, lambda m: ShardedOptimizer(m.parameters(), torch.optim.SGD, lr=1.0)])
def test_without_a_process_group_it_says_so(make):
    with pytest.raises(ValueError, match="init_process_group"):
        make(nn.Linear(1, 1))
