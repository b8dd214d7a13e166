"""torchpar.manual.DataParallel around modules of all kinds, on four gloo ranks, in float64.

The oracle is the same module on one rank, over the whole batch.
"""

import re
from functools import partial
from unittest.mock import patch

import modules
import pytest
import torch
import torch.distributed as dist
from modules import Odd, gradients, ids, normal, share, stack
from ranks import RANKS, on_ranks
from torch import nn

from compare.contract.communication import summed
from torchpar import DataParallel
from torchpar.comm.collectives import Axis
from torchpar.comm.counter import Call
from torchpar.manual.buckets import Bucket, make_buckets
from torchpar.manual.data_parallel import GradientSync
from torchpar.measure.ledger import LedgerMode, of_all_ranks
from torchpar.measure.places import group_names

each_sync = pytest.mark.parametrize("sync", ["naive", "flat", "overlapped", "bucketed"])
# Averages of four partial means in another order than one mean over all: a few units in the last place.
TOLERANCE = {"rtol": 1e-13, "atol": 1e-15}
close = partial(torch.testing.assert_close, **TOLERANCE)


def assert_same_gradients(expected: nn.Module, got: nn.Module) -> None:
    modules.assert_same(gradients(got), gradients(expected), **TOLERANCE)


@each_sync
@on_ranks
def test_every_sync_equals_one_rank(rank: int, sync: GradientSync) -> None:
    reference, replica = Odd(seed=0), Odd(seed=rank)
    replicas = DataParallel(replica, gradient_sync=sync, bucket_size_mb=2e-4)
    for a, b in zip(reference.state_dict().values(), replica.state_dict().values(), strict=True):
        assert torch.equal(a, b)  # the first rank's, buffer and frozen parameter too
    for _ in range(2):  # the second step finds the buckets reset
        for module in (reference, replica):
            module.zero_grad()
        reference(ids()).backward()
        replicas(share(ids(), rank)).backward()
        replicas.finish_gradient_synchronization()
        assert_same_gradients(reference, replica)


@on_ranks
def test_gradients_kept_as_zeros_between_steps(rank: int) -> None:
    reference, replica = Odd(), Odd()
    replicas = DataParallel(replica)
    for _ in range(3):
        for module in (reference, replica):
            module.zero_grad(set_to_none=False)
        reference(ids()).backward()
        replicas(share(ids(), rank)).backward()
        replicas.finish_gradient_synchronization()
    assert_same_gradients(reference, replica)


@each_sync
@on_ranks
def test_accumulation_reduces_once(rank: int, sync: GradientSync) -> None:
    reference, replica = Odd(), Odd()
    axis = Axis.of(None)
    replicas = DataParallel(replica, gradient_sync=sync, group=axis)
    axis.traffic.clear()
    for start in (0, 16, 32):
        reference(ids(count=48)[start : start + 16]).backward()
    with replicas.no_sync():
        for start in (0, 16):
            replicas(share(ids(count=48)[start : start + 16], rank)).backward()
    replicas(share(ids(count=48)[32:], rank)).backward()
    replicas.finish_gradient_synchronization()
    assert_same_gradients(reference, replica)
    sent = axis.traffic.bytes[Call("all_reduce", "world", "gradients")]
    assert sent == sum(p.nbytes for p in replica.parameters() if p.requires_grad)


class Branches(nn.Module):
    """Rank 1 does not use `sometimes`; no rank uses `never`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes, self.never = (nn.Linear(3, 3, dtype=torch.float64) for _ in range(3))

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        return self.always(self.sometimes(x) if use else x).square().mean()


@each_sync
@on_ranks
def test_unused_parameters(rank: int, sync: GradientSync) -> None:
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    reference, replica = Branches(), Branches()
    replicas = DataParallel(replica, gradient_sync=sync, bucket_size_mb=1e-4, find_unused_parameters=True)
    sum(reference(x[r : r + 1], r != 1) for r in range(RANKS)).div(RANKS).backward()
    replicas(x[rank : rank + 1], rank != 1).backward()
    replicas.finish_gradient_synchronization()
    assert replica.never.weight.grad is None
    assert_same_gradients(reference, replica)


@on_ranks
def test_an_unused_parameter_is_an_error_unless_announced(rank: int) -> None:
    strict = DataParallel(Branches())
    strict(torch.ones(1, 3, dtype=torch.float64), True).backward()
    with pytest.raises(RuntimeError, match=r"never\.bias has no gradient.*find_unused_parameters=True"):
        strict.finish_gradient_synchronization()


@each_sync
@on_ranks
def test_second_backward_is_an_error_after_which_one_can_go_on(rank: int, sync: GradientSync) -> None:
    reference, replica = Odd(), Odd()
    replicas = DataParallel(replica, gradient_sync=sync)
    replicas(ids()).backward()
    with pytest.raises(RuntimeError, match=r"ready twice.*no_sync"):
        replicas(ids()).backward()
    replicas.zero_grad()  # gives the step up
    reference(ids()).backward()
    replicas(share(ids(), rank)).backward()
    replicas.finish_gradient_synchronization()
    assert_same_gradients(reference, replica)


@on_ranks
def test_freezing_after_construction(rank: int) -> None:
    reference, replica = Odd(), Odd()
    replicas = DataParallel(replica, gradient_sync="bucketed")
    for module in (reference, replica):
        module.layers[1].inner.requires_grad_(False)
        module.frozen.requires_grad_(True)
    reference(ids()).backward()
    replicas(share(ids(), rank)).backward()
    replicas.finish_gradient_synchronization()
    assert replica.layers[1].inner.weight.grad is None
    assert replica.frozen.grad is not None
    assert_same_gradients(reference, replica)


@each_sync
@on_ranks
def test_fewer_parameters_than_ranks(rank: int, sync: GradientSync) -> None:
    module = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    replicas = DataParallel(module, gradient_sync=sync)
    x = torch.full((1, 2), float(rank), dtype=torch.float64)
    replicas(x).sum().backward()
    replicas.finish_gradient_synchronization()
    close(module.weight.grad, torch.full((1, 2), 1.5, dtype=torch.float64))


@each_sync
@on_ranks
def test_ledger_of_own_calls_and_of_the_dispatcher_agree(rank: int, sync: GradientSync) -> None:
    axis = Axis.of(None)
    replicas = DataParallel(Odd(), gradient_sync=sync, group=axis, find_unused_parameters=True)
    axis.traffic.clear()
    with LedgerMode(group_names(None)) as mode:
        replicas(ids()).backward()
        replicas.finish_gradient_synchronization()
    noted = mode.noted()
    assert summed(noted.rows) == axis.traffic.ledger({"world": RANKS}) != []
    assert noted.seen == noted.own
    assert of_all_ranks([noted], stages=[0], counts_own=True).is_complete


def test_buckets_are_filled_in_reverse_up_to_their_size():
    module = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(5)))  # 400 bytes each
    names = [bucket.names for bucket in make_buckets(module, 800)]
    assert names == [["4.weight", "3.weight"], ["2.weight", "1.weight"], ["0.weight"]]
    assert [bucket.names for bucket in make_buckets(module, 399)] == [
        [f"{i}.weight"] for i in (4, 3, 2, 1, 0)
    ]
    assert len(make_buckets(module, float("inf"))) == 1


def test_dtypes_do_not_share_a_bucket():
    kinds = [{p.dtype for p in bucket.parameters} for bucket in make_buckets(Odd(), float("inf"))]
    assert sorted(map(str, kinds)) == ["{torch.float32}", "{torch.float64}"]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"gradient_sync": "fast"}, "naive, flat, overlapped"), ({"bucket_size_mb": 0}, "must be positive")],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        DataParallel(nn.Linear(1, 1), **options)


def test_without_a_process_group_it_says_so():
    with pytest.raises(ValueError, match="init_process_group"):
        DataParallel(nn.Linear(1, 1))


@on_ranks
def test_a_bucket_that_nobody_waits_for_is_said(rank: int) -> None:
    """Its sum mostly arrives all the same before it is read: no number tells."""
    module = DataParallel(stack(2))
    with LedgerMode(group_names(None)) as whole:
        module(normal(4, 16)).sum().backward()
        module.finish_gradient_synchronization()
    assert whole.noted().rows
    assert not whole.noted().problems
    with patch.object(Bucket, "wait", lambda bucket: None), LedgerMode(group_names(None)) as without:
        module(normal(4, 16)).sum().backward()
        module.finish_gradient_synchronization()
    (problem,) = without.noted().problems
    assert re.fullmatch(r"\d+ all_reduce of gradients over world: never waited for.*", problem)
    dist.barrier()
