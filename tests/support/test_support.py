"""What protects the tests themselves: a process that is left behind, or a rank that fails, fails its test."""

import sys
import time

import processes
import psutil
import pytest
import torch
from processes import left_behind, start, wait_for
from ranks import RANKS, Ranks, on_ranks

from torchpar.comm.collectives import Axis

# In a session of its own, its parent gone.
ORPHAN = "import os; os.fork() and os._exit(0); os.setsid(); import time; time.sleep(1000)"


def test_a_test_that_leaves_an_orphan_fails(request, monkeypatch):
    monkeypatch.setattr(processes, "GONE_S", 0.5)
    ending = processes.no_process_left(request)
    next(ending)
    start([sys.executable, "-c", ORPHAN]).wait()
    wait_for(lambda: len(left_behind()) == 1)
    (orphan,) = left_behind()
    assert orphan.ppid() != psutil.Process().pid
    with pytest.raises(pytest.fail.Exception, match=f"left behind, and now ended: .*{orphan.pid}: "):
        next(ending)
    assert left_behind() == []


@on_ranks
def deed(rank: int, kind: str) -> None:
    """Rank 2 misbehaves while the others wait for it in an all-reduce."""
    if rank == 2 and kind == "raise":
        raise ValueError("a bad batch")
    if rank == 2 and kind == "hang":
        time.sleep(1000)
    total = torch.ones(1)
    Axis.of(None).all_reduce(total)
    assert total == RANKS


@pytest.mark.slow
def test_a_rank_that_misbehaves_fails_the_test_and_is_replaced(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.run(deed, kind="none")
    for kind, timeout_s, message in [
        ("raise", ranks.timeout_s, r"rank 2 failed:[^$]*in deed[^$]*ValueError: a bad batch"),
        ("hang", 2.0, r"no answer within 2 s from ranks \[0, 1, 2, 3\]"),
    ]:
        before, patience = [member.process.pid for member in ranks.members], ranks.timeout_s
        ranks.timeout_s = timeout_s
        with pytest.raises(pytest.fail.Exception, match=message):
            ranks.run(deed, kind=kind)
        assert not any(map(psutil.pid_exists, before))
        ranks.timeout_s = patience
        ranks.run(deed, kind="none")
    ranks.end()
