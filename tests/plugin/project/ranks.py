"""Tests on ranks that pass, fail, die, hang and skip."""

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist

import torchpar

seen = []


@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", [1, 2])
def test_fixtures_and_parameters(rank, world_size, device, mesh, kept, size, number, tmp_path, capsys):
    assert (world_size, device.type, mesh.mesh_dim_names, size) == (2, "cpu", ("data",), 3)
    seen.append(kept)
    assert seen == [kept] * number  # the module's fixture, in one process
    (tmp_path / "file").write_text("x")
    print("captured")
    assert capsys.readouterr().out == "captured\n"
    total = torch.tensor([rank + number])
    dist.all_reduce(total)
    assert total.item() == 2 * number + 1


class TestMethods:
    @pytest.mark.ranks(2, mesh={"one": 1, "two": 2})
    def test_method_and_ledger_of_the_mesh(self, mesh):
        with torchpar.ledger() as ledger:
            dist.all_reduce(torch.ones(4), group=mesh.get_group("two"))
            dist.all_reduce(torch.tensor(1.0))  # a single number
        torchpar.assert_communication(ledger, {("all_reduce", "two"): 16})
        assert {row.axis for row in ledger.rows} == {"two"}
        assert ledger.rows[0].source.startswith("test_ranks.py:")
        warnings.warn("careful", stacklevel=1)


@pytest.mark.ranks(2)
def test_later_rank_fails(rank):
    print(f"printed by {rank}")
    if rank == 1:
        raise KeyError("rank one")
    dist.all_reduce(torch.ones(1))  # waits for rank 1


@pytest.mark.ranks(2)
def test_ranks_are_replaced(rank, kept):
    assert kept not in seen
    dist.all_reduce(torch.ones(1))


@pytest.mark.ranks(2)
def test_rank_dies(rank):
    print(f"printed by {rank}", flush=True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


@pytest.mark.ranks(2, timeout=1.5)
def test_rank_hangs(rank):
    if rank == 1:
        time.sleep(600)


@pytest.mark.ranks(2)
def test_unequal_shapes(rank):
    dist.all_reduce(torch.ones(4 + rank))


@pytest.mark.ranks(2)
def test_group_is_destroyed(rank):
    dist.destroy_process_group()


@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True, raises=ZeroDivisionError)
def test_expected_failure(rank):
    1 / rank
    dist.all_reduce(torch.ones(1))


@pytest.mark.ranks(2)
def test_skip(rank):
    pytest.skip("not today")


@pytest.mark.ranks(3, mesh={"a": 2, "b": 2})
def test_wrong_mesh(mesh): ...


@pytest.mark.ranks(2)
@pytest.mark.devices(2)
def test_both_marks(mesh): ...


def test_no_mark(mesh): ...
