"""torchpar.manual.FSDP around modules of all kinds, on four gloo ranks, in float64.

The oracle is the same module on one rank, over the whole batch, with PyTorch's own optimizer.
"""

from functools import partial

import modules
import pytest
import torch
from modules import Odd, double, ids, share, stack
from ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchpar import FSDP
from torchpar.comm import process_groups
from torchpar.comm.collectives import Axis
from torchpar.comm.counter import Call

WAYS = {
    "zero3": {"zero": 3},
    "shard_grad_op": {"zero": 3, "reshard_after_forward": False},
    "zero2": {"zero": 2},
}
each_way = pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
# Averages of four partial means in another order than one mean over all: a few units in the last place,
# which Adam's division by a gradient's own size makes a little larger.
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}
close = partial(torch.testing.assert_close, **TOLERANCE)
assert_same = partial(modules.assert_same, **TOLERANCE)


def ends_and_layers(module: Odd) -> list:
    return [[module.embedding, module.head], *module.layers]


def assert_same_gradients(sharded: FSDP, reference: nn.Module) -> None:
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    zeros = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in sharded.pieces.items()}
    assert {name for name, p in sharded.pieces.items() if p.grad is not None} == expected.keys()
    whole = sharded.gather(zeros)
    assert_same({name: whole[name] for name in expected}, expected)


def train_like_one_rank(rank: int, reference: nn.Module, sharded: FSDP, *, steps: int = 3) -> None:
    """Clipping that bites and AdamW, held against one rank at every step."""
    alone = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    for step in range(steps):
        for module, batch in ((reference, ids(step)), (sharded, share(ids(step), rank))):
            module(batch).backward()
        sharded.finish_gradient_synchronization()
        assert_same_gradients(sharded, reference)
        trained = [p for p in reference.parameters() if p.grad is not None]
        close(sharded.clip_grad_norm_(0.1).float(), nn.utils.clip_grad_norm_(trained, 0.1).float(), rtol=1e-6)
        for each in (alone, optimizer):
            each.step()
            each.zero_grad()
    assert_same(sharded.full_state_dict(), reference.state_dict())


@each_way
@on_ranks
def test_any_module_equals_one_rank(rank: int, options: dict) -> None:
    for units in (None, lambda module: (), ends_and_layers):
        reference, module = Odd(seed=0), Odd(seed=rank)  # the first rank's values are everybody's
        sharded = FSDP(module, units=units and units(module), **options)
        train_like_one_rank(rank, reference, sharded)


@each_way
@on_ranks
def test_fewer_elements_than_ranks(rank: int, options: dict) -> None:
    sharded = FSDP(nn.Linear(2, 1, bias=False, dtype=double), **options)
    assert sharded.pieces["weight"].numel() == (rank < 2)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1.0, weight_decay=0.0)
    sharded(torch.full((1, 2), float(rank), dtype=double)).sum().backward()
    sharded.finish_gradient_synchronization()
    gradients = sharded.gather({"weight": sharded.pieces["weight"].grad})
    close(gradients["weight"], torch.full((1, 2), 1.5, dtype=double))
    optimizer.step()


@each_way
@on_ranks
def test_hybrid_shards_equal_one_rank(rank: int, options: dict) -> None:
    shards = process_groups.make_group([[0, 1], [2, 3]])
    replicas = process_groups.make_group([[0, 2], [1, 3]])
    module = Odd(seed=rank)
    train_like_one_rank(rank, Odd(), FSDP(module, group=shards, replicate_group=replicas, **options), steps=2)


@each_way
@on_ranks
def test_accumulation_reduces_once(rank: int, options: dict) -> None:
    axis, reference, module = Axis.of(None), Odd(), Odd()
    sharded = FSDP(module, group=axis, units=ends_and_layers(module), **options)
    axis.traffic.clear()
    for step in range(3):
        reference(ids(step)).backward()
    with sharded.no_sync():
        for step in range(2):
            sharded(share(ids(step), rank)).backward()
    sharded(share(ids(2), rank)).backward()
    sharded.finish_gradient_synchronization()
    axis.traffic.is_paused = True
    assert_same_gradients(sharded, reference)
    sent = axis.traffic.bytes
    trainable = sum(p.nbytes for p in reference.parameters() if p.requires_grad)
    assert sent[Call("reduce_scatter", "world", "gradients")] == trainable
    gathered = sent[Call("all_gather", "world", "parameters")]
    whole = sum(p.nbytes for p in reference.parameters())
    if not options.get("reshard_after_forward", options["zero"] == 3):
        assert gathered == whole, (options, gathered, whole)  # once a step, however many passes
    else:
        # Twice a pass, but for what lies at the top, which is gathered once.
        top = sum(p.nbytes for p in (reference.strided, reference.single, reference.frozen))
        assert gathered == 3 * 2 * (whole - top) + top, (options, gathered, whole, top)


@on_ranks
def test_two_backwards_without_no_sync_add_up(rank: int) -> None:
    reference, sharded = Odd(), FSDP(Odd())
    for step in range(2):
        reference(ids(step)).backward()
        sharded(share(ids(step), rank)).backward()
    sharded.finish_gradient_synchronization()
    assert_same_gradients(sharded, reference)


class Branch(nn.Module):
    """No rank uses `never`; `twice` runs twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3, dtype=double) for _ in range(2))
        self.twice = nn.Linear(3, 3, dtype=double)
        self.never = nn.Linear(3, 3, dtype=double)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.twice(self.layers[0](self.twice(x))).square().mean()


@each_way
@on_ranks
def test_unused_and_reused_layers(rank: int, options: dict) -> None:
    x = torch.linspace(-1, 1, 24, dtype=double).view(8, 3)
    reference, module = Branch(), Branch()
    sharded = FSDP(module, units=[*module.layers, module.twice, module.never], **options)
    for _ in range(2):
        reference(x).backward()
        sharded(share(x, rank)).backward()
        sharded.finish_gradient_synchronization()
    assert_same_gradients(sharded, reference)
    assert sharded.pieces["never.weight"].grad is None


@on_ranks
def test_freezing_after_construction(rank: int) -> None:
    reference, module = Odd(), Odd()
    sharded = FSDP(module)
    for each in (reference, module):
        each.layers[1].requires_grad_(False)
        each.frozen.requires_grad_(True)
    reference(ids()).backward()
    sharded(share(ids(), rank)).backward()
    sharded.finish_gradient_synchronization()
    assert_same_gradients(sharded, reference)


class Recomputed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


@each_way
@on_ranks
def test_recomputation_around_a_unit(rank: int, options: dict) -> None:
    x = torch.linspace(-1, 1, 8 * 16, dtype=double).view(8, 16)
    reference, module = (Recomputed(*stack(3)) for _ in range(2))
    sharded = FSDP(module, **options)
    for _ in range(2):
        for each in (reference, sharded):
            each.zero_grad()
        reference(x).backward()
        sharded(share(x, rank)).backward()
        sharded.finish_gradient_synchronization()
        assert_same_gradients(sharded, reference)


@each_way
@on_ranks
def test_evaluation_between_steps(rank: int, options: dict) -> None:
    reference, sharded = Odd(), FSDP(Odd(), **options)
    for _ in range(2):
        with torch.no_grad():
            close(sharded(ids()), reference(ids()))
        assert all(p.dim() == 1 for p in sharded.parameters())  # at rest again
        reference.zero_grad()
        sharded.zero_grad()
        reference(ids()).backward()
        sharded(share(ids(), rank)).backward()
        sharded.finish_gradient_synchronization()
        assert_same_gradients(sharded, reference)


def test_stages_that_fsdp_does_not_have_are_named():
    with pytest.raises(ValueError, match="use ShardedOptimizer"):
        FSDP(nn.Linear(1, 1), zero=1)
