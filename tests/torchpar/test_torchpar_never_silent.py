"""torchpar.manual's wrappers train what the plain module trains, or say why not, on four gloo ranks.

Loops that are not forward, backward, finish, step: each one trained something else, or nothing, without a
word. The oracle is the plain module on one rank, over the whole batch, in float64.
"""

import copy
from collections.abc import Callable
from functools import partial

import modules
import pytest
import torch
from modules import Odd, double, ids, normal, share, stack
from ranks import on_ranks
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from torchpar.comm.collectives import Axis
from torchpar.manual.data_parallel import DataParallel
from torchpar.manual.fully_sharded import FSDP, finish_mean, reduce_scatter_gradients
from torchpar.manual.sharded_optimizer import ShardedOptimizer
from torchpar.manual.zero.flat_parameters import flatten_parameters
from torchpar.manual.zero.flat_steps import FlatSteps

WAYS = {
    "zero3": {"zero": 3},
    "shard_grad_op": {"zero": 3, "reshard_after_forward": False},
    "zero2": {"zero": 2},
}
UNITS = {
    "layers": lambda module: None,
    "everything": lambda module: (),
    "custom": lambda module: [[module.embedding, module.head], *module.layers],
}
each_way = pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
# Averages of four partial means in another order than one mean over all: a few units in the last place,
# which Adam's division by a gradient's own size makes a little larger.
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}
close = partial(torch.testing.assert_close, **TOLERANCE)
assert_same = partial(modules.assert_same, **TOLERANCE)
AdamW = partial(torch.optim.AdamW, lr=1e-2)


class OldSGD(torch.optim.Optimizer):
    """Updates through `.data`, which no version counter sees; as many optimizers outside of PyTorch do."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-0.1)


OPTIMIZERS = {
    "fused": partial(AdamW, fused=True),  # bumps no version counter either
    "through data": OldSGD,
}


def assert_same_weights(sharded: FSDP, reference: nn.Module) -> None:
    weights = {name: sharded.full_state_dict()[name] for name, _ in reference.named_parameters()}
    assert_same(weights, dict(reference.named_parameters()))


# 1. A unit is at rest again when backward ends.


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


def finish(module: nn.Module) -> None:
    if isinstance(module, (FSDP, DataParallel)):
        module.finish_gradient_synchronization()


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


# 2. What is gathered is what the optimizer made.


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


@each_way
@on_ranks
def test_weights_written_while_they_are_gathered(rank: int, options: dict) -> None:
    for write in (
        lambda module: module.load_state_dict({name: t + 1 for name, t in module.state_dict().items()}),
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


# 3. Parameters whose memory was replaced.


def through_another_dtype(module: nn.Module) -> None:
    module.to(torch.float32).to(double)


def through_a_vector(module: nn.Module) -> None:
    """Twice what they were."""
    vector_to_parameters(2 * parameters_to_vector(module.parameters()), module.parameters())


def new_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * 0.5


REPLACEMENTS = (through_another_dtype, through_a_vector, new_data)


def train(module: nn.Module, optimizer, x: torch.Tensor, *, reduce=lambda: None, steps: int = 2) -> None:
    for _ in range(steps):
        module(x).square().mean().backward()
        reduce()
        optimizer.step()
        optimizer.zero_grad()


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
    with pytest.raises(RuntimeError, match=r"0\.weight is \(16, 16\) torch.float32 .* and was .*float64"):
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
    sharded.load_state_dict(sharded.state_dict(), assign=True)
    with pytest.raises(RuntimeError, match=r"0\.weight .*replaced.*assign"):
        sharded(x)
    sharded = FSDP(stack(2), **options)
    sharded.module[1].bias = None
    with pytest.raises(RuntimeError, match=r"1\.bias .*replaced"):
        sharded(x)


# 4. No step with gradients that are not synchronised.

no_finish = partial(pytest.raises, RuntimeError, match=r"finish_gradient_synchronization\(\) before")


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


# Optimizers and wrappers that do not know of each other.


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
    del optimizer  # its hooks stay
    with pytest.raises(RuntimeError, match=r"gradients of 0\.weight go to a ShardedOptimizer"):
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


# Passes that end in other ways.


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
