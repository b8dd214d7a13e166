"""The ranks that other tests run on: whichever fails, the test fails with its error."""

import os
import signal
import time

import psutil
import pytest
import torch
from forks import run_forked
from processes import PATIENCE_S
from ranks import RANKS, Ranks, on_ranks

from torchpar.comm.collectives import Axis


@on_ranks
def deed(rank: int, kind: str) -> None:
    """Rank 2 misbehaves while the others wait for it in an all-reduce."""
    if rank == 2:
        match kind:
            case "raise":
                raise ValueError("a bad batch")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "leave":
                os._exit(7)
            case "hang":
                time.sleep(1000)
    total = torch.ones(1)
    Axis.of(None).all_reduce(total)
    assert total == RANKS


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raise", r"rank 2 failed:[^$]*in deed[^$]*ValueError: a bad batch"),
        ("die", "rank 2 was killed by SIGKILL"),
        ("leave", "rank 2 left with exit code 7"),
        ("hang", r"no answer within 2 s from ranks \[0, 1, 2, 3\]"),
    ],
)
def test_a_rank_that_misbehaves_fails_the_test_and_is_replaced(kind, message, tmp_path):
    ranks = Ranks(tmp_path)
    ranks.run(deed, kind="none")
    before = [member.process.pid for member in ranks.members]
    if kind == "hang":
        ranks.timeout_s = 2.0
    with pytest.raises(pytest.fail.Exception, match=message):
        ranks.run(deed, kind=kind)
    assert not any(map(psutil.pid_exists, before))
    ranks.timeout_s = PATIENCE_S
    ranks.run(deed, kind="none")
    ranks.end()


def test_a_test_that_fails_on_one_rank_only_fails(tmp_path):
    ranks = Ranks(tmp_path)
    with pytest.raises(pytest.fail.Exception, match=r"rank 3 failed:[^$]*assert rank != 3"):
        ranks.run(not_on_the_last)
    assert ranks.members == []


@on_ranks
def not_on_the_last(rank: int) -> None:
    assert rank != 3


def speak(code: int) -> int:
    print("a word")
    os.system("echo another >&2")
    if code < 0:
        raise ValueError("a bad code")
    return code


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (3, 3), (-1, 1)])
def test_a_forked_process_says_how_it_ended(code, expected, tmp_path):
    done = run_forked(speak, code, output=tmp_path / "output")
    assert (done.returncode, done.stdout) == (expected, "a word\n")
    assert done.stderr.startswith("another\n")
    assert ("ValueError: a bad code" in done.stderr) == (code < 0)
