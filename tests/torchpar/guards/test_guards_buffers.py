"""Buffers under torchpar's wrappers, on four gloo ranks. The oracle is PyTorch's DDP."""

from functools import partial

import pytest
import torch
from modules import double, normal, share
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from compare.contract.communication import BUFFERS
from torchpar import FSDP, DataParallel, ShardedOptimizer
from torchpar.comm.collectives import Axis
from torchpar.comm.counter import Call, Traffic
from torchpar.guards.buffers import broadcast_buffers
from torchpar.measure.ledger import LedgerMode
from torchpar.measure.places import group_names

WRAPPERS = {"data_parallel": DataParallel, "zero3": FSDP, "zero2": partial(FSDP, zero=2)}
each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14)


class Normed(nn.Module):
    """Statistics of two dtypes, a buffer that is not saved, a strided one, an empty one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(6, 6, dtype=double), nn.BatchNorm1d(6, dtype=double), nn.Linear(6, 6, dtype=double)
        )
        self.register_buffer("passes", torch.zeros((), dtype=torch.bool), persistent=False)
        self.register_buffer("scale", normal(2, 6).t())
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes.logical_not_()
        return (self.layers(x) @ self.scale).square().mean()


def batch(step: int, rank: int) -> torch.Tensor:
    return share(normal(32, 6, seed=step), rank)


def passes(model: nn.Module, module: nn.Module, rank: int) -> list[dict[str, torch.Tensor]]:
    """Training, accumulation, evaluation and training again: the buffers after each forward."""
    seen = []

    def run(step: int) -> None:
        loss = model(batch(step, rank))
        if loss.requires_grad:
            loss.backward()
        seen.append({name: buffer.clone() for name, buffer in module.named_buffers()})

    def finish() -> None:
        if not isinstance(model, DistributedDataParallel):
            model.finish_gradient_synchronization()
        model.zero_grad()

    run(0)
    finish()
    with model.no_sync():
        run(1)
        run(2)
    run(3)
    finish()
    module.eval()
    with torch.no_grad():
        run(4)
        run(5)
    module.train()
    for step in (6, 7):
        run(step)
        finish()
    return seen


@each_wrapper
@on_ranks
def test_buffers_are_those_of_ddp_after_every_forward(rank: int, wrap) -> None:
    theirs, ours = Normed(), Normed()
    expected = passes(DistributedDataParallel(theirs), theirs, rank)
    for step, (got, want) in enumerate(zip(passes(wrap(ours), ours, rank), expected, strict=True)):
        for name, buffer in want.items():
            close(got[name], buffer, msg=lambda text, name=name, step=step: f"pass {step}, {name}: {text}")


@each_wrapper
@on_ranks
def test_one_broadcast_a_pass_and_none_without_buffers(rank: int, wrap) -> None:
    for make, count in ((Normed, 1), (partial(nn.Linear, 6, 6, dtype=double), 0)):
        for broadcasts in (True, False):
            axis = Axis.of(None)
            model = wrap(make(), group=axis, broadcast_buffers=broadcasts)
            axis.traffic.clear()
            with LedgerMode(group_names(None)) as mode:
                model(batch(0, rank)).sum().backward()
                model.finish_gradient_synchronization()
            noted, expected = mode.noted(), count if broadcasts else 0
            assert axis.traffic.calls[Call("broadcast", "world", BUFFERS)] == expected
            assert sum(row.calls for row in noted.rows if row.purpose == BUFFERS) == expected


@each_wrapper
@on_ranks
def test_two_forwards_before_one_backward(rank: int, wrap) -> None:
    """As of a GAN's two batches: under DDP autograd objects to the statistics' change, and to constants'."""
    alone, module = Normed(), Normed()
    model = wrap(module)
    for each in (alone, model):
        (each(batch(0, rank)) + each(batch(1, rank))).backward()
    model.finish_gradient_synchronization()
    mean = {name: p.grad.clone() for name, p in alone.named_parameters()}
    for gradient in mean.values():
        Axis.of(None).all_reduce(gradient)
    got = {name: p.grad for name, p in model.named_parameters()}
    if isinstance(model, FSDP):
        got = model.gather({name: p.grad for name, p in model.pieces.items()})
    for name, gradient in mean.items():
        close(got[name if name in got else f"module.{name}"], gradient / 4)


class Moving(nn.Module):
    """Backward reads the average, which moves with each forward of the first rank."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=double))
        self.register_buffer("average", torch.ones(4, dtype=double))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.average.mul_(0.9).add_(x.mean())
        return (self.weight * self.average).sum()


@each_wrapper
@on_ranks
def test_a_value_that_backward_needs_is_not_overwritten_silently(rank: int, wrap) -> None:
    model = wrap(Moving())
    first = model(torch.full((), float(rank), dtype=double))
    model.eval()
    second = model(torch.zeros((), dtype=double))  # broadcasts, and changes nothing itself
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (first + second).backward()


@on_ranks
def test_without_a_wrapper_buffers_are_broadcast_by_hand(rank: int) -> None:
    module = Normed()
    ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1, reduce_gradients=True)
    module(batch(0, rank))
    mean = module.layers[1].running_mean
    whole = mean.new_empty(4 * len(mean))
    Axis.of(None).all_gather(whole, mean)
    assert not torch.equal(whole[:6], whole[6:12])
    broadcast_buffers(module)
    close(mean, whole[:6])
    axis = Axis("alone", size=1, rank=0, group=None, traffic=Traffic())
    broadcast_buffers(module, axis)
    assert not axis.traffic.calls
