"""Sameness of modules and DTensors with one device, on ranks; ranks from a script."""

import copy
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import torchpar
from compare.system.workers import WorkerError
from tests.support.ranks import RANKS, normal, on_ranks

C = 8


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(C, 2 * C), nn.Tanh(), nn.Linear(2 * C, C)).double()


def backward(module: nn.Module, x_BC: torch.Tensor) -> None:
    module(x_BC).square().mean().backward()


def difference(sharded: object, reference: object, **options: bool) -> str:
    with pytest.raises(AssertionError) as error:
        torchpar.assert_same(sharded, reference, **options)
    return str(error.value)


@on_ranks
def test_wrappers_equal_one_device(rank: int) -> None:
    reference, x_BC = model(), normal(8, C)
    replicas = DistributedDataParallel(copy.deepcopy(reference))
    sharded = fully_shard(copy.deepcopy(reference), mesh=init_device_mesh("cpu", (RANKS,)))
    backward(reference, x_BC)
    for module in (replicas, sharded):
        backward(module, x_BC.chunk(RANKS)[rank])
        torchpar.assert_same(module, reference, gradients=True)
        with torch.no_grad():
            next(iter(module.parameters())).mul_(2)
        text = difference(module, reference, gradients=True)
        assert (
            "1 of 8 values differ from the reference\n0.weight (float64, shape (16, 8)): 128 of 128" in text
        )


@on_ranks
def test_missing_reduction_is_named(rank: int) -> None:
    reference, local, x_BC = model(), model(), normal(8, C)
    backward(reference, x_BC)
    backward(local, x_BC.chunk(RANKS)[rank])
    text = difference(local, reference, gradients=True)
    assert text.count("their mean is the reference: an all-reduce (mean) is missing") == 4
    assert "0.weight.grad" in text
    parts = normal(RANKS, C)
    assert "their sum is the reference: an all-reduce is missing" in difference(parts[rank], parts.sum(0))
    for parameter in local.parameters():
        dist.all_reduce(parameter.grad)
    assert f"{RANKS} times the reference (axis world has {RANKS} devices)" in difference(
        local, reference, gradients=True
    )


@on_ranks
def test_one_rank_differs(rank: int) -> None:
    """Only this rank calls: it does not wait for the others."""
    x_C = normal(C)
    if rank == 2:
        text = difference(x_C + (torch.arange(C) == 5), x_C)
        assert "1 of 8 numbers differ, most at [5]" in text
        assert "copies" not in text


@on_ranks
def test_dtensor_has_places(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    x_TC = normal(6, C)
    for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(1)]):
        torchpar.assert_same({"x": [distribute_tensor(x_TC, mesh, placements)]}, {"x": [x_TC]})
    wrong_TC = x_TC.clone()
    wrong_TC[4, 6] += 1
    text = difference({"x": [distribute_tensor(wrong_TC, mesh, [Shard(0), Shard(1)])]}, {"x": [x_TC]})
    assert "x[0] (float64, shape (6, 8))" in text
    assert "only in the parts of rank 3" in text
    h, w = (
        distribute_tensor(x, mesh["model"], [Shard(d)]) for x, d in ((normal(4, C), 1), (normal(C, C), 0))
    )
    product = h @ w
    assert product.placements == (Partial(),)
    torchpar.assert_same(product, normal(4, C) @ normal(C, C))


def test_differences_of_structure():
    reference = model()
    smaller = {name: value for name, value in reference.state_dict().items() if name != "2.bias"}
    assert "2.bias: it is only in the reference" in difference(smaller, reference)
    assert "2.bias: the reference has no such value" in difference(reference, smaller)
    other = copy.deepcopy(reference)
    backward(reference, normal(2, C))
    assert "0.weight.grad: the gradient is None instead of Tensor" in difference(
        other, reference, gradients=True
    )
    torchpar.assert_same({"lr": 0.1, "name": "adam", "none": None}, {"lr": 0.1, "name": "adam", "none": None})
    assert "name: 'sgd' instead of 'adam'" in difference({"name": "sgd"}, {"name": "adam"})
    torchpar.assert_same(torch.ones(2, dtype=torch.bfloat16) * 1.01, torch.ones(2))


def rank_plus(number: int) -> int:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return number + int(total)


def fails(kind: str) -> None:
    if dist.get_rank() == 1:
        if kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("rank one")
    dist.all_reduce(torch.ones(1))


@pytest.mark.slow
def test_run_ranks():
    assert torchpar.run_ranks(rank_plus, 2, 10) == [11, 11]
    assert torchpar.run_ranks(lambda: dist.get_world_size(), 2) == [2, 2]
    with pytest.raises(KeyError, match="rank one") as error:
        torchpar.run_ranks(fails, 2, "fails")
    assert "rank 1 of 2 failed" in str(error.value.__cause__)
    with pytest.raises(WorkerError, match="rank 1 of 2: killed by SIGKILL"):
        torchpar.run_ranks(fails, 2, "dies")


def test_mistakes_of_run_ranks_are_one_line():
    for count in (0, True, 2.0):
        with pytest.raises(ValueError, match="give the number of ranks, 1 or more"):
            torchpar.run_ranks(rank_plus, count)
    with pytest.raises(ValueError, match="choose fork or spawn"):
        torchpar.run_ranks(rank_plus, 2, start="thread")
    with pytest.raises(
        ValueError, match=r"cannot send .*<lambda> .* define it with def at the top of a module"
    ):
        torchpar.run_ranks(lambda: 1, 2, start="spawn")
