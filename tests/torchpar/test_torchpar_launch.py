"""Forked ranks of torchpar: the rank to blame is named, and no rank outlives its parent.

Each test has a process of its own, which launches four ranks.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.context import ForkContext
from pathlib import Path

import psutil
import pytest
import torch

from compare.execute.launch import child_environment
from compare.side import supervisor
from compare.side.ending import RunFailed
from compare.side.process_states import Heartbeat
from compare.spec.engines.registry import SIDES
from tests.support import endless, processes, warm
from tests.support.processes import PATIENCE_S, Busy, assert_gone, in_order
from tests.support.warm import run_forked
from torchpar.comm import process_groups
from torchpar.comm.collectives import Axis
from torchpar.launch import Rank, gpu_of, launch, shared_cells

ROOT = Path(__file__).parents[2]
ENVIRONMENT = child_environment(SIDES["torchpar"], "cpu")
TIMEOUT_S = 3.0  # of ranks that hang
SHORT_S = 1.0


def fail() -> None:
    raise ValueError("a bad\nbatch")


WAITED = ": no progress for 3 s, while ranks 0, 1, 3 waited in step 3, backward"
KILLED = "was killed by SIGKILL at step 3 (perhaps out of memory)"
DEEDS = {
    "fail": (fail, "failed at step 3: ValueError: a bad batch"),
    "die": (lambda: os.kill(os.getpid(), signal.SIGKILL), KILLED),
    "leave": (lambda: os._exit(0), "left with exit code 0 at step 3"),
    "stop": (lambda: os.kill(os.getpid(), signal.SIGSTOP), "gave no answer" + WAITED),
    "sleep": (lambda: time.sleep(1000), "stayed in step 3, forward" + WAITED),
}
"""Deeds of rank 2 in the forward pass of step 3, and the resulting message."""


def misbehave(rank: Rank, *, deed: str) -> None:
    """Six steps with an all-reduce each; rank 2 does the deed at step 3."""
    torch.set_num_threads(1)
    process_groups.join_ranks(rank, "cpu")
    for step in range(6):
        rank.at(step, "forward")
        if rank.rank == 2 and step == 3:
            DEEDS[deed][0]()
        rank.at(step, "backward")
        Axis.from_group(process_groups.world_group()).all_reduce(torch.ones(3))
    process_groups.leave_group()


def parent(main: Callable[[Rank], None], timeout_s: float, all_compute: bool = False) -> int:
    """Launch, and print the failure as JSON."""
    if all_compute:
        supervisor.Activity = Busy
    try:
        launch(main, world_size=4, timeout_s=timeout_s)
    except RunFailed as error:
        children = psutil.Process().children(recursive=True)
        found = {"message": error.failure.message, "traceback": error.failure.traceback}
        print(json.dumps(found | {"rank": error.failure.rank, "left": len(children)}))
    return 0


@pytest.mark.parametrize("deed", DEEDS)
def test_rank_to_blame_is_named(deed):
    timeout_s = TIMEOUT_S if deed in ("stop", "sleep") else PATIENCE_S
    done = run_forked(parent, partial(misbehave, deed=deed), timeout_s)
    found = json.loads(done.stdout)
    assert found["message"] == f"rank 2 {DEEDS[deed][1]}"
    assert (found["rank"], found["left"]) == (2, 0)
    assert ("in misbehave" in found["traceback"]) == (deed == "fail")  # its own stack


def start_slowly(rank: Rank, *, rank_1: str) -> None:
    """Before the first step, rank 1 computes for long, or sleeps; the other ranks wait."""
    assert rank.rendezvous
    ready = rank.rendezvous.with_name("ready")
    if rank.rank == 1 and rank_1 == "computes":
        time.sleep(3 * SHORT_S)  # `Busy` makes it count as computing
        ready.touch()
    while not ready.exists():
        time.sleep(0.05)


@pytest.mark.parametrize(("rank_1", "hangs"), [("computes", False), ("sleeps", True)])
def test_computing_before_step_0_is_no_hang(rank_1, hangs):
    main = partial(start_slowly, rank_1=rank_1)
    done = run_forked(parent, main, SHORT_S, not hangs)
    message = "no rank made progress for 1 s: all wait in the start"
    assert (json.loads(done.stdout)["message"] == message) if hangs else (done.stdout == "")


class Running:
    """`python -m torchpar` on a long run, past its first steps."""

    def __init__(self, folder: Path, *arguments: str):
        self.folder = folder
        endless.write_request(folder, devices=4)
        self.process = processes.start(
            [warm.python(), "-m", "torchpar", str(folder), *arguments],
            stdin=subprocess.PIPE,
            cwd=ROOT,
            env=ENVIRONMENT,
        )
        endless.wait_for_steps(folder, self.process)
        self.parent = warm.program(self.process.pid)
        self.ranks = in_order(self.parent.children(recursive=True))
        assert len(self.ranks) == 4

    def end(self) -> str:
        """Wait for the end of all ranks. Returns stderr."""
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        assert_gone(self.ranks)
        assert not [*self.folder.glob("*.tmp")]
        return errors


def test_ctrl_c_ends_all_ranks(tmp_path):
    running = Running(tmp_path)
    os.killpg(running.parent.pid, signal.SIGINT)  # as a terminal does, also to the ranks
    assert running.end() == "torchpar: ended by SIGINT\n"
    assert running.process.returncode == 128 + signal.SIGINT


def test_ranks_end_with_a_killed_parent(tmp_path):
    running = Running(tmp_path)
    if sys.platform == "linux":
        running.ranks[2].suspend()
    running.parent.kill()
    running.end()


def test_ranks_end_with_stdin(tmp_path):
    running = Running(tmp_path, "--exit-with-stdin")
    running.ranks[1].suspend()  # a stopped rank cannot end itself
    running.end()  # communicate() closes stdin
    assert running.process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(("task", "visible", "index"), [("1", 1, 0), ("1", 2, 1), ("", 1, 1)])
def test_gpu_of_a_slurm_task(task, visible, index, monkeypatch):
    """SLURM may make only one GPU visible to each task."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    if task:
        monkeypatch.setenv("SLURM_PROCID", task)
    assert gpu_of(1) == index


def test_forked_ranks_need_no_dev_shm(monkeypatch):
    """multiprocessing keeps shared arrays in files of /dev/shm, which may be read-only."""
    monkeypatch.setattr("multiprocessing.heap.Arena", lambda size: pytest.fail("a file is made"))
    heartbeat = Heartbeat(shared_cells(ForkContext()))
    rank = os.fork()
    if not rank:
        heartbeat.at(3, "forward")
        os._exit(0)
    os.waitpid(rank, 0)
    assert (heartbeat.where, heartbeat.beats) == ("step 3, forward", 1)
