"""`torchpar.DataParallel`, `FSDP` and `ShardedOptimizer` around modules, on four gloo ranks, in float64.

A table of habits: each is a module that trains as usual. The oracle is the same module on one rank, over the
whole batch, with PyTorch's own optimizer.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import modules
import pytest
import torch
from modules import Odd, double, ids, normal, share, stack
from ranks import RANKS, on_ranks
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.utils.checkpoint import checkpoint

from torchpar import FSDP, DataParallel, ShardedOptimizer
from torchpar.comm import process_groups
from torchpar.comm.collectives import Axis
from torchpar.wrappers import Piece, default_units

# Averages of four partial means in another order than one mean over all: a few units in the last place,
# which Adam's division by a gradient's own size makes a little larger.
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}
close = partial(torch.testing.assert_close, **TOLERANCE)
assert_same = partial(modules.assert_same, **TOLERANCE)
ADAM = {"lr": 1e-2, "eps": 1e-4}  # a gradient that is only rounding is not divided by itself
AdamW = partial(torch.optim.AdamW, **ADAM)


class Branch(nn.Module):
    """No rank uses `never`; `twice` runs twice."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(7, 7, dtype=double) for _ in range(2))
        self.twice, self.never = (nn.Linear(7, 7, dtype=double) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.twice(nn.functional.one_hot(tokens, 7).double())
        return self.twice(self.layers[1](self.layers[0](x))).square().mean()


class Recomputed(Branch):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = nn.functional.one_hot(tokens, 7).double() + self.twice.bias
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


class Tied(nn.Module):
    """Two layers of a list share a weight, and a third has one with the module around it."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(7, 7, dtype=double) for _ in range(4))
        self.layers[2].weight = self.layers[0].weight
        self.scale = self.layers[3].weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = nn.functional.one_hot(tokens, 7).double()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * self.scale.sum()).square().mean()


@dataclass
class Aux:
    loss: torch.Tensor


class Secretive(nn.Module):
    """After its output it makes losses, which backward enters first; no tensor that it returns shows them."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(7, 7, dtype=double)

    def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> tuple[torch.Tensor, Aux]:
        y = torch.tanh(self.inner(x))
        losses.append(self.inner(x).square().mean())
        self.kept = self.inner(x).sin().mean()
        return y, Aux(self.inner(x).cos().mean())


class Secrets(nn.Module):
    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(Secretive() for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, losses = nn.functional.one_hot(tokens, 7).double(), list[torch.Tensor]()
        for layer in self.layers:
            x, aux = layer(x, losses)
            losses += [aux.loss, layer.kept]
        return x.square().mean() + torch.stack(losses).sum()


def ends_and_layers(module: Any) -> list:
    return [[module.embedding, module.head], *module.layers] if hasattr(module, "head") else []


HABITS: dict[str, Callable[[int], nn.Module]] = {
    "tied to the end, frozen, strided, two dtypes": Odd,
    "unused, and used twice": Branch,
    "recomputed": Recomputed,
    "tied between layers": Tied,
    "losses that no output shows": Secrets,
}
SHARDED: dict[str, dict[str, Any]] = {
    "zero3": {"zero": 3},
    "kept after forward": {"zero": 3, "reshard_after_forward": False},
    "zero2": {"zero": 2},
    "one unit": {"units": ()},
    "units by hand": {"units": ends_and_layers},
    "found unused": {"find_unused_parameters": True},
}
SYNCS = ("naive", "flat", "overlapped", "bucketed")


def groups(named: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Biases do not decay."""
    decays = [p for name, p in named.items() if "bias" not in name]
    rest = [p for name, p in named.items() if "bias" in name]
    return [{"params": g, "weight_decay": d} for g, d in ((decays, 0.1), (rest, 0.0)) if g]


def options_for(module: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    units = options.get("units")
    return {**options, "units": units(module)} if callable(units) else options


def limit(make: Callable[[int], nn.Module]) -> float:
    """Of the norm: one that bites, but where a norm is partly float32."""
    return 1e9 if make is Odd else 0.1


def reference(make: Callable[[int], nn.Module], *, steps: int) -> Iterator[nn.Module]:
    """The plain module after each step of three passes."""
    module = make(0)
    optimizer = AdamW(groups(dict(module.named_parameters())))
    for step in range(steps):
        for part in range(3):
            module(ids(3 * step + part)).div(3).backward()
        clip_grad_norm_([p for p in module.parameters() if p.grad is not None], limit(make))
        optimizer.step()
        optimizer.zero_grad()
        yield module


def three_passes(model: Any, rank: int, step: int) -> None:
    for part in range(3):
        with model.no_sync() if part < 2 else nullcontext():
            model(share(ids(3 * step + part), rank)).div(3).backward()
    model.finish_gradient_synchronization()


@on_ranks
def test_data_parallel(rank: int) -> None:
    for make in HABITS.values():
        for sync in SYNCS:
            module = make(rank)  # the first rank's values are everybody's
            model = DataParallel(
                module, gradient_sync=sync, bucket_size_mb=2e-4, find_unused_parameters=make is not Odd
            )
            optimizer = AdamW(groups(dict(module.named_parameters())))
            for step, expected in enumerate(reference(make, steps=2)):
                three_passes(model, rank, step)
                clip_grad_norm_([p for p in module.parameters() if p.grad is not None], limit(make))
                optimizer.step()
                optimizer.zero_grad()
                assert_same(module.state_dict(), expected.state_dict())


@on_ranks
def test_fully_sharded(rank: int) -> None:
    shards = process_groups.make_group([[0, 1], [2, 3]])
    replicas = process_groups.make_group([[0, 2], [1, 3]])
    hybrid = {"group": shards, "replicate_group": replicas}
    for make in HABITS.values():
        for options in (*SHARDED.values(), hybrid):
            module = make(rank)
            plain = {name for name, _ in module.named_parameters()}
            unused = {"find_unused_parameters": True} if isinstance(module, Branch) else {}
            model = FSDP(module, **{**options_for(module, options), **unused})
            assert model.pieces.keys() == plain
            optimizer = AdamW(groups(model.pieces))
            for step, expected in enumerate(reference(make, steps=2)):
                three_passes(model, rank, step)
                model.clip_grad_norm_(limit(make))
                optimizer.step()
                optimizer.zero_grad()
                assert_same(model.full_state_dict(), expected.state_dict())
                with torch.no_grad():
                    close(model(ids()), expected(ids()))
                assert all(isinstance(p, Piece) for p in model.parameters())  # at rest again


@on_ranks
def test_sharded_optimizer(rank: int) -> None:
    for make in HABITS.values():
        module = make(rank)
        named = dict(module.named_parameters())
        optimizer = ShardedOptimizer(groups(named), torch.optim.AdamW, bucket_size_mb=2e-4, **ADAM)
        model = DataParallel(module, find_unused_parameters=True)
        for step, expected in enumerate(reference(make, steps=2)):
            three_passes(model, rank, step)
            clip_grad_norm_([p for p in named.values() if p.grad is not None], limit(make))
            optimizer.step()
            optimizer.zero_grad()
            assert_same(module.state_dict(), expected.state_dict())
        held = sum(v.numel() for state in optimizer.state.values() for v in state.values() if v.dim())
        assert held <= 2 * sum(p.numel() for p in named.values()) // RANKS + 2 * len(named)


@on_ranks
def test_used_on_some_ranks_only(rank: int) -> None:
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.always, self.sometimes, self.never = (nn.Linear(3, 3, dtype=double) for _ in range(3))

        def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
            return self.always(self.sometimes(x) if use else x).square().mean()

    x, plain = normal(RANKS, 3), Sometimes()
    sum(plain(x[r : r + 1], r != 1) for r in range(RANKS)).div(RANKS).backward()
    for sync in SYNCS:
        replica = Sometimes()
        model = DataParallel(replica, gradient_sync=sync, bucket_size_mb=1e-4, find_unused_parameters=True)
        model(x[rank : rank + 1], rank != 1).backward()
        model.finish_gradient_synchronization()
        assert_same(modules.gradients(replica), modules.gradients(plain))
    sharded = FSDP(Sometimes(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    sharded(x[rank : rank + 1], rank != 1).backward()
    sharded.finish_gradient_synchronization()
    assert sharded.pieces["never.weight"].grad is None
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same(sharded.full_state_dict(), plain.state_dict())


@on_ranks
def test_buffers_are_the_first_ranks(rank: int) -> None:
    for wrap in (DataParallel, FSDP):
        module = nn.Sequential(nn.Linear(3, 3, dtype=double), nn.BatchNorm1d(3, dtype=double))
        model, x = wrap(module), normal(4, 3, seed=rank)
        for _ in range(2):
            model(x).sum().backward()
            model.finish_gradient_synchronization()
        before = Axis.of(None).all_gather_objects(module[1].running_mean)
        assert not torch.equal(before[0], before[1])  # each rank's share of the data
        model(x)
        with torch.no_grad():  # FSDP gathers a layer that is called on all ranks
            close(module[1].running_mean, 0.9 * before[0] + 0.1 * module[0](x).mean(0))


@on_ranks
def test_whole_states(rank: int) -> None:
    model, other = FSDP(Odd(rank)), Odd(7)
    model.load_full_state_dict(other.state_dict())
    assert_same(model.full_state_dict(), other.state_dict())
    close(model(ids()), other(ids()))
    with pytest.raises(ValueError, match="that differ: head"):
        model.load_full_state_dict({k: v for k, v in other.state_dict().items() if k != "head.weight"})
    with pytest.raises(ValueError, match="that differ: single"):
        model.load_full_state_dict({**other.state_dict(), "single": torch.zeros(4)})
    with pytest.raises(RuntimeError, match="full_state_dict"):
        model.state_dict()


def scaled_step(optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


@pytest.mark.parametrize("make", [DataParallel, FSDP])
@on_ranks
def test_gradients_are_left_alone_until_they_are_finished(rank: int, make: Callable[..., Any]) -> None:
    model = make(stack(2))
    parameters = list(model.parameters())
    optimizer = AdamW(parameters)
    early: list[Callable[[], Any]] = [
        optimizer.step,
        lambda: model(normal(4, 16)),
        lambda: clip_grad_norm_(parameters, 1.0),
        lambda: clip_grad_value_(parameters, 1e-3),
        lambda: get_total_norm([p.grad for p in parameters]),
        lambda: [p.grad.data.mul_(2) for p in parameters],
        lambda: scaled_step(optimizer),
    ]
    if make is FSDP:
        early.append(lambda: model.clip_grad_norm_(1.0))
    model(normal(4, 16)).sum().backward()
    for act in early:
        with pytest.raises(RuntimeError, match="finish_gradient_synchronization"):
            act()
    model.finish_gradient_synchronization()
    optimizer.step()


@on_ranks
def test_only_elements_of_pieces_may_be_looked_at(rank: int) -> None:
    plain, module = stack(2), stack(2)
    model = FSDP(module)
    pieces = list(model.parameters())
    optimizer = torch.optim.SGD(pieces, lr=0.1)
    model(share(normal(16, 16), rank)).square().sum().mul(RANKS).backward()
    model.finish_gradient_synchronization()
    alone: list[Callable[[], Any]] = [
        lambda: clip_grad_norm_(pieces, 1.0),
        lambda: get_total_norm([p.grad for p in pieces]),
        lambda: [p.grad.data.float().norm() for p in pieces],
        lambda: [p.grad.detach().square().sum() for p in pieces],
        lambda: [p.grad.isnan().any() for p in pieces],
        lambda: [p.norm() for p in pieces],
        lambda: scaled_step(optimizer),
        lambda: [p for p in pieces if p.dim() >= 2],
        lambda: [{"params": [p], "weight_decay": 0.1 * (p.ndim > 1)} for p in pieces],
        lambda: [p for p in pieces if len(p.shape) > 1],
    ]
    for act in alone:
        with pytest.raises(RuntimeError, match=r"rank's pieces .* FSDP.pieces.* FSDP.clip_grad_norm_"):
            act()
    clip_grad_value_(pieces, 0.5)
    optimizer.step()
    with torch.no_grad():
        for piece in pieces:
            piece.sub_(piece.grad, alpha=0.01)

    plain(normal(16, 16)).square().sum().backward()
    clip_grad_value_(plain.parameters(), 0.5)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.sub_(parameter.grad, alpha=0.11)
    assert_same(model.full_state_dict(), plain.state_dict())


def without_the_last(make: Callable[[nn.Module], Any]) -> None:
    """A step in which a layer takes no part."""
    module = stack(2)
    wrapper = make(module)
    module[0](normal(4, 16)).sum().backward()
    wrapper.finish_gradient_synchronization()


def shard_state(module: nn.Module) -> ShardedOptimizer:
    return ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)


@on_ranks
def test_units_may_be_compiled(rank: int) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        graphs.append(graph)
        return graph.forward

    plain, module = stack(2), stack(2)
    for layer in module:
        layer.compile(backend=backend)
    model = FSDP(module)
    model(normal(4, 16)).square().mean().backward()
    model.finish_gradient_synchronization()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    plain(normal(4, 16)).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert graphs
    assert_same(model.full_state_dict(), plain.state_dict())


def penalty(model: nn.Module) -> torch.Tensor:
    """Of the gradient by the input, whose derivative is one more."""
    x = normal(4, 16).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return gradient.square().sum()


@on_ranks
def test_second_derivatives_need_the_weights_whole(rank: int) -> None:
    plain = stack(2)
    penalty(plain).backward()
    with pytest.raises(RuntimeError, match=r"second derivative.*reshard_after_forward=False"):
        penalty(FSDP(stack(2)))
    model = FSDP(stack(2), reshard_after_forward=False)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    penalty(model).backward()
    model.finish_gradient_synchronization()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert_same(model.full_state_dict(), plain.state_dict())


@on_ranks
def test_what_is_not_usual_is_refused(rank: int) -> None:
    wrapped = stack(2)
    DataParallel(wrapped)
    model = FSDP(stack(2))
    module = stack(2)
    frozen_later, replaced = FSDP(stack(2)), FSDP(stack(2))
    frozen_later.pieces["0.weight"].requires_grad_(False)
    replaced.module[0].bias.data = torch.zeros_like(replaced.module[0].bias)
    optimizer = shard_state(stack(2))
    twice = nn.Sequential(*(nn.Sequential(layer) for layer in stack(2)))
    twice[1].append(twice[0][0])
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: without_the_last(DataParallel), "took no part"),
        (lambda: without_the_last(FSDP), "took no part"),
        (optimizer.finish_gradient_synchronization, "by DataParallel"),
        (lambda: FSDP(wrapped), "a wrapper already"),
        (lambda: DataParallel(nn.Embedding(3, 3, sparse=True)), "sparse"),
        (lambda: FSDP(stack(2), zero=1), "use ShardedOptimizer"),
        (lambda: FSDP(module, units=[module[0], module]), "fully_shard"),
        (lambda: FSDP(module, units=[nn.Linear(1, 1)]), "no part of the module"),
        (lambda: FSDP(twice), "in another one's, too"),
        (lambda: copy.deepcopy(model), "whole state"),
        (model.double, "before it is wrapped"),
        (lambda: frozen_later(normal(4, 16)), "frozen or thawed.*fully_shard"),
        (lambda: replaced(normal(4, 16)), "replaced"),
        (lambda: torch.optim.Adafactor(model.parameters()).step(), "Adafactor.*elements"),
        (lambda: ShardedOptimizer(stack(2).parameters(), torch.optim.LBFGS), "LBFGS.*fully_shard"),
        (lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}), "ZeroRedundancy"),
    ]
    for act, message in refused:
        with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
            act()


def test_without_a_process_group_it_says_so():
    for make in (DataParallel, FSDP, shard_state):
        with pytest.raises(ValueError, match="init_process_group"):
            make(nn.Linear(1, 1))


def test_default_units_are_the_layers_of_the_outermost_lists():
    inner = nn.Sequential(nn.Linear(1, 1))
    module = nn.ModuleDict({"a": nn.ModuleList([inner, nn.Linear(1, 1)]), "b": nn.Linear(1, 1)})
    assert [type(unit) for unit in default_units(module)] == [nn.Sequential, nn.Linear]
    assert list(default_units(stack(2)))
