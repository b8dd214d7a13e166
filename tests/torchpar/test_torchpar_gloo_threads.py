"""gloo has one worker in every group of a run, and its threads do not preempt the rank."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from compare.spec.experiment import ExperimentError
from tests.support.ranks import on_ranks
from torchpar.comm import gloo, process_groups

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has SCHED_BATCH")


def threads() -> dict[int, int]:
    """The policy of every thread of this process."""
    found = (int(task.name) for task in Path("/proc/self/task").iterdir())
    return {thread: os.sched_getscheduler(thread) for thread in found}


@on_ranks
def test_group_has_one_worker(rank: int) -> None:
    """With gloo's two workers six of six runs of 24,000 gathers aborted (2 ranks, torch 2.13)."""
    pairs, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    for group in (process_groups.world_group(), pairs):
        assert group is not None
        backend = group._get_backend(torch.device("cpu"))
        assert isinstance(backend, dist.ProcessGroupGloo)
        assert backend.options._threads == 1
    mine = torch.full((2,), float(rank))
    for _ in range(100):
        under_way = [functional.all_gather_tensor(mine, 0, pairs) for _ in range(8)]
        for gathered in under_way:
            assert gathered.tolist() == [2.0 * (rank // 2)] * 2 + [2.0 * (rank // 2) + 1] * 2


@on_ranks
def test_threads_of_a_group_yield(rank: int) -> None:
    before = threads()
    assert os.SCHED_BATCH in before.values()  # threads of the group of all ranks
    dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    begun = {thread: policy for thread, policy in threads().items() if thread not in before}
    assert set(begun.values()) == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_interface_that_is_missing(monkeypatch):
    """gloo's own error names neither the variable nor the interfaces of this host."""
    monkeypatch.setenv(gloo.INTERFACE, "lo,eth77")
    monkeypatch.setattr(gloo.psutil, "net_if_addrs", lambda: {"lo": [], "eth0": []})
    with pytest.raises(ExperimentError, match=r"GLOO_SOCKET_IFNAME = lo,eth77: .* eth77, and has lo, eth0:"):
        gloo.make_backend(dist.HashStore(), 0, 1, timedelta(seconds=1))
