"""torchpar.manual.DataParallel around modules of all kinds, on four gloo ranks, in float64.

One launch of a fresh interpreter runs every case below; a rank that disagrees ends it with its traceback.
The oracle is the same module on one rank, over the whole batch.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from torchpar import collectives
from torchpar.collectives import Axis
from torchpar.launch import bind_to_loopback, launch
from torchpar.ledger import CommunicationMode
from torchpar.manual.data_parallel import DataParallel, make_buckets
from torchpar.rank import Rank
from torchpar.traffic import Call

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
RANKS = 4
SYNCS = ("naive", "flat", "overlapped", "bucketed")
# Averages of four partial means in another order than one mean over all: a few units in the last place.
close = partial(torch.testing.assert_close, rtol=1e-13, atol=1e-15)


class Odd(nn.Module):
    """Tied, frozen, strided and half-used parameters, two dtypes, and a buffer."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 6, dtype=torch.float64)
        self.inner = nn.Linear(6, 6, dtype=torch.float64)
        self.strided = nn.Parameter(torch.randn(5, 6, dtype=torch.float64).t())
        self.single = nn.Parameter(torch.randn(5))
        self.frozen = nn.Parameter(torch.randn(5, dtype=torch.float64), requires_grad=False)
        self.head = nn.Linear(6, 7, bias=False, dtype=torch.float64)
        self.head.weight = self.embedding.weight
        self.register_buffer("offset", torch.randn(5, dtype=torch.float64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inner(self.embedding(ids)))
        y = x @ self.strided + self.frozen + self.single.double() + self.offset
        return self.head(x).square().mean() + y.square().mean()


def ids(count: int = 16) -> torch.Tensor:
    return torch.randint(7, (count,), generator=torch.Generator().manual_seed(3))


def share(whole: torch.Tensor, rank: int) -> torch.Tensor:
    return whole.chunk(RANKS)[rank]


def assert_same_gradients(expected: nn.Module, got: nn.Module) -> None:
    pairs = zip(expected.named_parameters(), got.parameters(), strict=True)
    for (name, a), b in pairs:
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            kwargs = {"rtol": 1e-5, "atol": 1e-6} if a.dtype == torch.float32 else {}
            close(b.grad, a.grad, msg=lambda text, name=name: f"{name}: {text}", **kwargs)


def case_every_sync_equals_one_rank(rank: Rank) -> None:
    for sync in SYNCS:
        reference, replica = Odd(seed=0), Odd(seed=rank.rank)
        replicas = DataParallel(replica, gradient_sync=sync, bucket_size_mb=2e-4)
        for a, b in zip(reference.state_dict().values(), replica.state_dict().values(), strict=True):
            assert torch.equal(a, b)  # the first rank's, buffer and frozen parameter too
        for _ in range(2):  # the second step finds the buckets reset
            for module in (reference, replica):
                module.zero_grad()
            reference(ids()).backward()
            replicas(share(ids(), rank.rank)).backward()
            replicas.finish_gradient_synchronization()
            assert_same_gradients(reference, replica)


def case_gradients_kept_as_zeros_between_steps(rank: Rank) -> None:
    reference, replica = Odd(), Odd()
    replicas = DataParallel(replica)
    for _ in range(3):
        for module in (reference, replica):
            module.zero_grad(set_to_none=False)
        reference(ids()).backward()
        replicas(share(ids(), rank.rank)).backward()
        replicas.finish_gradient_synchronization()
    assert_same_gradients(reference, replica)


def case_accumulation_reduces_once(rank: Rank) -> None:
    for sync in SYNCS:
        reference, replica = Odd(), Odd()
        axis = Axis.of(None)
        replicas = DataParallel(replica, gradient_sync=sync, group=axis)
        axis.traffic.clear()
        for start in (0, 16, 32):
            reference(ids(48)[start : start + 16]).backward()
        with replicas.no_sync():
            for start in (0, 16):
                replicas(share(ids(48)[start : start + 16], rank.rank)).backward()
        replicas(share(ids(48)[32:], rank.rank)).backward()
        replicas.finish_gradient_synchronization()
        assert_same_gradients(reference, replica)
        sent = axis.traffic.bytes[Call("all_reduce", "world", "gradients")]
        assert sent == sum(p.nbytes for p in replica.parameters() if p.requires_grad)


class Branches(nn.Module):
    """Rank 1 does not use `sometimes`; nobody uses `never`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes, self.never = (nn.Linear(3, 3, dtype=torch.float64) for _ in range(3))

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        return self.always(self.sometimes(x) if use else x).square().mean()


def case_unused_parameters(rank: Rank) -> None:
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    for sync in SYNCS:
        reference, replica = Branches(), Branches()
        replicas = DataParallel(replica, gradient_sync=sync, bucket_size_mb=1e-4, find_unused_parameters=True)
        sum(reference(x[r : r + 1], r != 1) for r in range(RANKS)).div(RANKS).backward()
        replicas(x[rank.rank : rank.rank + 1], rank.rank != 1).backward()
        replicas.finish_gradient_synchronization()
        assert replica.never.weight.grad is None
        assert_same_gradients(reference, replica)
    strict = DataParallel(Branches())
    strict(x, True).backward()
    with pytest.raises(RuntimeError, match=r"never\.bias has no gradient.*find_unused_parameters=True"):
        strict.finish_gradient_synchronization()


def case_second_backward_is_an_error(rank: Rank) -> None:
    for sync in SYNCS:
        replicas = DataParallel(Odd(), gradient_sync=sync)
        replicas(ids()).backward()
        with pytest.raises(RuntimeError, match=r"ready twice.*no_sync"):
            replicas(ids()).backward()


def case_freezing_after_construction(rank: Rank) -> None:
    reference, replica = Odd(), Odd()
    replicas = DataParallel(replica, gradient_sync="bucketed")
    for module in (reference, replica):
        module.inner.requires_grad_(False)
        module.frozen.requires_grad_(True)
    reference(ids()).backward()
    replicas(share(ids(), rank.rank)).backward()
    replicas.finish_gradient_synchronization()
    assert replica.inner.weight.grad is None
    assert replica.frozen.grad is not None
    assert_same_gradients(reference, replica)


def case_fewer_parameters_than_ranks(rank: Rank) -> None:
    for sync in SYNCS:
        module = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        replicas = DataParallel(module, gradient_sync=sync)
        x = torch.full((1, 2), float(rank.rank), dtype=torch.float64)
        replicas(x).sum().backward()
        replicas.finish_gradient_synchronization()
        close(module.weight.grad, torch.full((1, 2), 1.5, dtype=torch.float64))


def case_ledger_of_the_door_and_of_the_dispatcher_agree(rank: Rank) -> None:
    for sync in SYNCS:
        axis = Axis.of(None)
        replicas = DataParallel(Odd(), gradient_sync=sync, group=axis, find_unused_parameters=True)
        axis.traffic.clear()
        with CommunicationMode([axis], door=axis.traffic, default_purpose="elsewhere") as mode:
            replicas(ids()).backward()
            replicas.finish_gradient_synchronization()
        assert mode.seen.ledger({"world": RANKS}) == axis.traffic.ledger({"world": RANKS}) != []


def case_strided_tensors_are_refused(rank: Rank) -> None:
    with pytest.raises(ValueError, match="non-contiguous"):
        Axis.of(None).all_reduce(torch.zeros(3, 2).t())


CASES = [value for name, value in list(globals().items()) if name.startswith("case_")]


def run_cases(rank: Rank) -> None:
    torch.set_num_threads(1)
    collectives.join_group(
        rank=rank.rank,
        world_size=RANKS,
        device=torch.device("cpu"),
        rendezvous=rank.rendezvous,
        timeout_s=60,
    )
    for case in CASES:
        case(rank)
        Axis.of(None).all_reduce(torch.zeros(1))  # in step, so that a failure is one case's own
        if rank.rank == 0:
            print(case.__name__, flush=True)
    collectives.leave_group()


def test_data_parallel_on_four_ranks(tmp_path):
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == [case.__name__ for case in CASES]
    assert not list(tmp_path.iterdir())  # the rendezvous file is gone


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


if __name__ == "__main__":
    bind_to_loopback()
    launch(run_cases, world_size=RANKS, folder=Path(sys.argv[1]), timeout_s=60)
