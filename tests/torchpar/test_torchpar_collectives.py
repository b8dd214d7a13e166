"""Collectives of `torchpar.comm`, compared with their definitions, on four gloo ranks."""

import itertools
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.ranks import RANKS, axis, normal, on_ranks
from torchpar.comm import collectives
from torchpar.comm.collectives import Axis, chunk_slices

double = torch.float64
close = partial(torch.testing.assert_close, rtol=0.0, atol=0.0)  # whole numbers


@on_ranks
def test_nccl_calls_equal_sends(rank: int) -> None:
    """The calls for NCCL, on gloo, with equal shards and with uneven shards, which are padded."""
    world = axis()
    for count in (1, 3, 8, 10, 1000):
        cut = chunk_slices(count, RANKS)[rank]
        mine = torch.arange(count, dtype=double) * (rank + 1)
        for sends in (True, False):
            with patch.object(Axis, "_sends", lambda axis, tensor, sends=sends: sends):
                summed = torch.empty(cut.stop - cut.start, dtype=double)
                world.reduce_scatter(summed, mine.clone())
                close(summed, (torch.arange(count, dtype=double) * 10)[cut])
                full = torch.empty(count, dtype=double)
                world.all_gather(full, summed)
                close(full, torch.arange(count, dtype=double) * 10)
                received = torch.empty(RANKS, 2, dtype=double)
                world.all_to_all(received, torch.full((RANKS, 2), float(rank), dtype=double))
                close(received[:, 1], torch.arange(RANKS, dtype=double))


@on_ranks
def test_strided_tensor_is_rejected(rank: int) -> None:
    with pytest.raises(ValueError, match="non-contiguous"):
        axis().all_reduce(torch.zeros(3, 2).t())


@on_ranks
def test_chunks_in_place_are_not_copied(rank: int) -> None:
    for rows in (1, 2):
        with ExitStack() as stack:
            for name in ("cat", "stack") if rows == 1 else ():
                stack.enter_context(patch.object(torch, name, side_effect=AssertionError("a copy")))
            summed = axis().reduce_scatter_dim(normal(rows, 2 * RANKS, 3, seed=rank), 1, purpose="")
            gathered = axis().all_gather_dim(summed, 1, purpose="")
        expected = sum(normal(rows, 2 * RANKS, 3, seed=seed) for seed in range(RANKS))
        torch.testing.assert_close(gathered, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter"])
def test_blocking_call_runs_on_the_current_stream(name: str) -> None:
    """With async_op=True NCCL runs on a stream of its own, with two events, and keeps the tensors."""
    pair, seen = Axis("pair", size=2, rank=0, group=None), []

    def call(*tensors: torch.Tensor, group: object, async_op: bool) -> SimpleNamespace | None:
        seen.append(async_op)
        return SimpleNamespace(wait=lambda: None) if async_op else None

    tensors = {"all_reduce": [4], "all_gather": [4, 2], "reduce_scatter": [2, 4]}[name]
    with ExitStack() as stack:
        stack.enter_context(patch.object(Axis, "_sends", lambda axis, tensor: False))
        stack.enter_context(patch.object(dist, "all_reduce", call))
        for function in ("gather_equal", "reduce_scatter_equal"):
            stack.enter_context(patch.object(collectives, function, call))
        getattr(pair, name)(*map(torch.zeros, tensors))
        getattr(pair, f"start_{name}")(*map(torch.zeros, tensors)).wait()
    assert seen == [False, True]


@on_ranks
def test_gloo_sends_only_from_the_cpu(rank: int) -> None:
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    assert axis()._sends(torch.zeros(1))
    assert not axis()._sends(on_gpu)  # gloo would read an address of the GPU


def test_chunk_slices_cover_all_elements():
    for count, ranks in itertools.product((0, 1, 3, 10, 4097), (1, 2, 3, 8)):
        cuts = chunk_slices(count, ranks)
        assert [i for cut in cuts for i in range(cut.start, cut.stop)] == list(range(count))
        sizes = [cut.stop - cut.start for cut in cuts]
        assert sizes == sorted(sizes, reverse=True)
        assert (len(sizes), sizes[0]) == (ranks, -(-count // ranks))


@on_ranks
def test_axis_is_named_after_its_group(rank: int) -> None:
    pairs, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    of_pairs = Axis.from_group(pairs)
    assert axis().name == "world"
    assert (of_pairs.name, of_pairs.size, of_pairs.rank) == ("subgroup", 2, rank % 2)
    columns = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))["columns"].get_group()
    assert Axis.from_group(columns).name == "columns"
