"""The ledger of anybody's module: planted surprises are found with the modules and lines that cause them."""

import pytest
import torch
from ranks import RANKS, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchpar
from compare.contract.ledger import UnexpectedCommunicationError, assert_communication, differences
from torchpar import FSDP, DataParallel

C = 64
F32 = 4
WEIGHTS = 2 * F32 * C * C


def two_layers(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(C, C, bias=False), *between, nn.Linear(C, C, bias=False))


def step(model: nn.Module, rank: int) -> None:
    model(torch.full((8, C), 1.0 + rank)).square().mean().backward()


@on_ranks
def test_ddp_sends_every_gradient_once(rank: int) -> None:
    model = DistributedDataParallel(two_layers(nn.Tanh()))
    for _ in range(2):  # it sends its order of buckets in the first
        step(model, rank)
    with torchpar.ledger() as ledger:
        step(model, rank)
    assert_communication(ledger, {("all_reduce", "world"): WEIGHTS})
    assert {row.phase for row in ledger.rows} == {"backward"}
    assert {row.group_size for row in ledger.rows} == {RANKS}
    assert "test_torchpar_places.py" in str(ledger)


@on_ranks
def test_a_buffer_that_ddp_sends_every_step_is_named_with_its_module(rank: int) -> None:
    model = DistributedDataParallel(two_layers(nn.BatchNorm1d(C, affine=False)))
    for _ in range(2):
        step(model, rank)
    with torchpar.ledger() as ledger:
        step(model, rank)
    with pytest.raises(UnexpectedCommunicationError, match=r"unexpected: broadcast over world .*Distributed"):
        assert_communication(ledger, {("all_reduce", "world"): WEIGHTS})


@on_ranks
def test_a_unit_that_fsdp2_gathers_twice_is_seen_in_forward_and_in_backward(rank: int) -> None:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",))

    def ledger_of(*, reshards: bool):
        model = two_layers(nn.Tanh())
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshards)
        fully_shard(model, mesh=mesh)
        step(model, rank)
        with torchpar.ledger(mesh) as ledger:
            step(model, rank)
        return ledger

    once = {("all_gather", "shard"): WEIGHTS, ("reduce_scatter", "shard"): WEIGHTS}
    assert_communication(ledger_of(reshards=False), once)
    twice = ledger_of(reshards=True)
    found = differences(twice, once)
    assert found[0] == f"all_gather over shard: {2 * WEIGHTS:,} bytes instead of {WEIGHTS:,}:"
    gathers = [row for row in twice.rows if row.kind == "all_gather"]
    assert {row.phase for row in gathers} == {"forward", "backward"}
    assert all("Sequential" in row.source for row in gathers if row.phase == "forward")


@on_ranks
def test_torchpar_s_own_collectives_are_rows_whatever_they_are_made_of(rank: int) -> None:
    replicas = DataParallel(two_layers(), gradient_sync="flat")
    with torchpar.ledger() as ledger:
        step(replicas, rank)
        replicas.finish_gradient_synchronization()
    assert_communication(ledger, {("all_reduce", "world", "gradients"): WEIGHTS})

    sharded = FSDP(two_layers())
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    with torchpar.ledger() as ledger:
        step(sharded, rank)
        sharded.finish_gradient_synchronization()
        optimizer.step()
    gathers = {("all_gather", "world", "parameters"): None, ("reduce_scatter", "world", "gradients"): WEIGHTS}
    assert_communication(ledger, gathers)


@on_ranks
def test_nothing_is_noted_after_the_end(rank: int) -> None:
    model = DataParallel(two_layers(), gradient_sync="flat")
    with torchpar.ledger() as ledger:
        pass
    step(model, rank)
    model.finish_gradient_synchronization()
    assert ledger.rows == []
    assert_communication(ledger, {})
