"""The ledger of any program: every form of a collective, unexpected calls with their lines, all ranks."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import torchpar
from compare.contract.communication import Communication
from compare.contract.ledger import UnexpectedCommunicationError, assert_communication
from tests.support.ranks import ALONE, RANKS, axis, on_ranks
from torchpar import testing
from torchpar.manual.data_parallel import DataParallel
from torchpar.manual.fully_sharded import FSDP
from torchpar.measure.ledger import KINDS, RankLedger, of_all_ranks

N = 8
PIECE = 4 * N
"""Bytes of a float32 piece."""
FULL = RANKS * PIECE
C = 64
WEIGHTS = 2 * 4 * C * C
"""Bytes of two float32 layers."""


def piece() -> torch.Tensor:
    return torch.ones(N)


def full() -> torch.Tensor:
    return torch.ones(RANKS * N)


def pieces() -> list[torch.Tensor]:
    return [piece() for _ in range(RANKS)]


def coalesced(call, *make) -> None:
    with dist._coalescing_manager():
        for _ in range(2):
            call(*(tensor() for tensor in make))


def functional(name: str, tensor: torch.Tensor, *options: object, **output: torch.Tensor) -> None:
    group, operators = dist.group.WORLD, torch.ops._c10d_functional
    assert group is not None
    operators.wait_tensor(getattr(operators, name)(tensor, *options, group.group_name, **output))


FORMS = [
    ("all_to_all", FULL, lambda rank: dist.all_to_all_single(full(), full())),
    ("all_to_all", FULL, lambda rank: dist.all_to_all(pieces(), pieces())),
    ("gather", FULL, lambda rank: dist.gather(piece(), None if rank else pieces())),
    ("scatter", FULL, lambda rank: dist.scatter(piece(), None if rank else pieces())),
    ("all_gather", FULL, lambda rank: dist.all_gather(pieces(), piece())),
    ("reduce_scatter", FULL, lambda rank: dist.reduce_scatter(piece(), pieces())),
    ("all_reduce", 2 * PIECE, lambda rank: dist.all_reduce_coalesced([piece(), piece()])),
    ("all_gather", 2 * FULL, lambda rank: dist.all_gather_coalesced([pieces()[:2]] * RANKS, pieces()[:2])),
    ("all_gather", 2 * FULL, lambda rank: coalesced(dist.all_gather_into_tensor, full, piece)),
    ("reduce_scatter", 2 * FULL, lambda rank: coalesced(dist.reduce_scatter_tensor, piece, full)),
    ("all_gather", FULL, lambda rank: functional("all_gather_into_tensor_out", piece(), RANKS, out=full())),
    ("all_gather", FULL, lambda rank: functional("all_gather_into_tensor", piece(), RANKS)),
    ("reduce_scatter", FULL, lambda rank: functional("reduce_scatter_tensor", full(), "sum", RANKS)),
    ("all_reduce", PIECE, lambda rank: functional("all_reduce", piece(), "sum")),
]


@on_ranks
def test_every_form_has_kind_and_bytes(rank: int) -> None:
    for form, (kind, size, call) in enumerate(FORMS):
        with torchpar.ledger() as ledger:
            call(rank)
        rows = [(row.kind, row.calls, row.bytes, row.dtype) for row in ledger.rows]
        assert rows == [(kind, 1, size, "float32")], form
        factor = 2 if kind == "all_reduce" else 1
        assert ledger.rows[0].wire_bytes == factor * size * (RANKS - 1) // RANKS, form
        assert not ledger.problems, form
    model = DistributedDataParallel(nn.Embedding(9, N, sparse=True))
    with torchpar.ledger() as ledger:  # sparse gradients, with their indices
        model(torch.tensor([1, 2])).sum().backward()
    assert_communication(ledger, {("all_reduce", "world"): 2 * (PIECE + 8)})


@on_ranks
def test_axis_of_a_mesh_over_all_ranks(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "axis_of_world", None)
        check_axes_of_meshes()


def check_axes_of_meshes() -> None:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("data",))
    model = DistributedDataParallel(nn.Linear(N, N, bias=False), process_group=mesh.get_group("data"))
    for _ in range(2):  # in the second step DDP sends its order of buckets
        model(piece()).sum().backward()
    for options in ({"mesh": mesh}, {}):
        with torchpar.ledger(**options) as ledger:
            model(piece()).sum().backward()
        assert_communication(ledger, {("all_reduce", "data"): 4 * N * N})
    other = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("other",))
    with torchpar.ledger() as ledger:
        model(piece()).sum().backward()
    with pytest.raises(
        UnexpectedCommunicationError, match=r"world is PyTorch's default group: torchpar\.ledger"
    ):
        assert_communication(ledger, {("all_reduce", "data"): 4 * N * N})
    sharded = fully_shard(nn.Linear(N, N, bias=False), mesh=other)
    with torchpar.ledger() as ledger:
        sharded(piece()).sum().backward()
    assert_communication(ledger, {("all_gather", "other"): 4 * N * N, ("reduce_scatter", "other"): 4 * N * N})


@on_ranks
def test_single_numbers_may_count(rank: int) -> None:
    """A loss travels alone, gathered, or together with other tensors."""
    for send in (
        lambda: dist.all_reduce(torch.tensor(1.0)),
        lambda: dist.all_gather([torch.tensor(0.0) for _ in range(RANKS)], torch.tensor(1.0)),
        lambda: dist.all_reduce_coalesced([torch.ones(3), torch.ones(1)]),
    ):
        with torchpar.ledger() as ledger:
            dist.all_reduce(piece())
            send()
        more = sum(row.bytes - row.scalars for row in ledger.rows) - PIECE
        assert_communication(ledger, {("all_reduce", "world"): PIECE + more})
        with pytest.raises(UnexpectedCommunicationError):
            assert_communication(ledger, {("all_reduce", "world"): PIECE + more}, scalars=True)
    with torchpar.ledger() as ledger:
        dist.all_reduce(torch.tensor(1.0))
    assert_communication(ledger, {("all_reduce", "world"): 4})
    with pytest.raises(UnexpectedCommunicationError, match="missing: all_reduce over world"):
        assert_communication(ledger, {("all_reduce", "world"): None})


@on_ranks
def test_unknown_operator_is_a_problem(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch, torchpar.ledger() as ledger:
        patch.delitem(KINDS, "allreduce")
        total = piece()
        dist.all_reduce(total)
    assert total[0] == RANKS
    assert ledger.problems == ["allreduce_ is in no row: c10d::allreduce_ is not known"]
    with pytest.raises(UnexpectedCommunicationError, match="incomplete"):
        assert_communication(ledger, {})


@on_ranks
def test_rows_have_lines_and_phases(rank: int) -> None:
    with torchpar.ledger() as ledger:
        dist.all_gather_into_tensor(full(), piece())
        dist.all_gather_into_tensor(full(), piece())
        dist.reduce_scatter_tensor(piece(), full())
    assert len({row.source for row in ledger.rows}) == 3  # one is behind a decorator
    assert all(row.source.startswith("test_torchpar_ledger.py:") for row in ledger.rows)

    model = nn.Sequential(*(nn.Linear(N, N) for _ in range(4)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model(piece()).sum().backward()
    with torchpar.ledger() as ledger:
        optimizer.step()  # it runs another optimizer inside
    assert {(row.kind, row.phase) for row in ledger.rows} == {("broadcast", "update")}


def two_layers(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(C, C, bias=False), *between, nn.Linear(C, C, bias=False))


def step(model: nn.Module, rank: int) -> None:
    model(torch.full((8, C), 1.0 + rank)).square().mean().backward()


@on_ranks
def test_ddp_buffer_has_its_module(rank: int) -> None:
    for between, is_planted in ((nn.Tanh(), False), (nn.BatchNorm1d(C, affine=False), True)):
        model = DistributedDataParallel(two_layers(between))
        for _ in range(2):  # in the first step DDP sends its order of buckets
            step(model, rank)
        with torchpar.ledger() as ledger:
            step(model, rank)
        if is_planted:
            with pytest.raises(UnexpectedCommunicationError, match=r"broadcast over world .*Distributed"):
                assert_communication(ledger, {("all_reduce", "world"): WEIGHTS})
        else:
            assert_communication(ledger, {("all_reduce", "world"): WEIGHTS})
            assert {(row.phase, row.group_size) for row in ledger.rows} == {("backward", RANKS)}
            assert "test_torchpar_ledger.py" in str(ledger)


@on_ranks
def test_own_collective_is_one_row(rank: int) -> None:
    module = two_layers()
    axis_of = dict.fromkeys(module.parameters(), axis())
    replicas = DataParallel(module, gradient_sync="flat", bucket_size_mb=0.0, axis_of=axis_of, ranks=RANKS)
    with torchpar.ledger() as ledger:
        step(replicas, rank)
        replicas.finish_gradient_synchronization()
    assert_communication(ledger, {("all_reduce", "world", "gradients"): WEIGHTS})

    module = two_layers()
    options = {"zero": 3, "reshard_after_forward": True, "inputs_only": (), "fill": lambda modules: None}
    options |= {"axis_of": dict.fromkeys(module.parameters(), axis()), "shards": axis(), "replicas": ALONE}
    sharded = FSDP(module, units=[[layer] for layer in module], **options)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    with torchpar.ledger() as ledger:
        step(sharded, rank)
        sharded.finish_gradient_synchronization()
        optimizer.step()
    gathers = {("all_gather", "world", "parameters"): None, ("reduce_scatter", "world", "gradients"): WEIGHTS}
    assert_communication(ledger, gathers)


def of_rank(*sizes: int, dispatched: int, own: int) -> RankLedger:
    """A rank that sends in several places."""
    rows = [
        Communication(kind="permute", axis="pp", calls=1, bytes=size, wire_bytes=size, source=f"line {place}")
        for place, size in enumerate(sizes)
    ]
    return RankLedger(rows, Counter(pp=dispatched), Counter(pp=own))


def test_stage_has_rows_of_its_busiest_rank():
    ranks = [of_rank(*of, dispatched=sum(of), own=sum(of)) for of in [(10, 3), (12,), (7,)]]
    ledger = of_all_ranks(ranks, stages=[0, 0, 1], counts_own=True)
    rows = [(row.stage, row.source, row.bytes) for row in ledger.rows]
    assert rows == [(0, "line 0", 12), (0, "line 1", 3), (1, "line 0", 7)]
    assert not ledger.problems


def test_dispatcher_saw_our_bytes():
    """Padding is allowed: at most one number for each call and rank."""
    for seen, complete in [(1000, True), (1016, True), (1017, False), (0, False)]:
        ranks = [of_rank(1000, dispatched=seen, own=1000), of_rank(dispatched=0, own=0)]
        problem = f"along pp our own calls send 1,000 bytes, and the dispatcher saw {seen:,}"
        ledger = of_all_ranks(ranks, stages=[0, 0], counts_own=True)
        assert ledger.problems == ([] if complete else [problem]), seen
        # torchpar does not count the calls of a library.
        assert of_all_ranks(ranks, stages=[0, 0], counts_own=False).problems == []
    ranks = [of_rank(10, dispatched=10, own=0)._replace(problems=said) for said in [(), ("a",), ("a", "b")]]
    assert of_all_ranks(ranks, stages=[0, 0, 0], counts_own=False).problems == ["a", "b"]
