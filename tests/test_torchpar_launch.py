"""The parent of torchpar's ranks: whom it blames, how it ends, and that nothing outlives it.

Each case has a process of its own, which launches four ranks that misbehave.
"""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from forks import run_forked

from compare.contract import record
from compare.contract.experiment import Experiment, Layout, Model, Train
from compare.contract.record import Request, read_failure, read_record, write_json
from torchpar import groups
from torchpar.collectives import Axis
from torchpar.launch import bind_to_loopback, launch
from torchpar.rank import Rank
from torchpar.watch import RanksFailed

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
TIMEOUT_S = 3.0
LONG = Experiment(
    model=Model(n_layer=2, n_head=4, n_embd=32, block_size=16),
    train=Train(max_iters=100_000, batch_size=8),
    layout=Layout(dp_replicate=4),
)


# What rank 2 does at step 3, in its forward pass.


def fail() -> None:
    raise ValueError("a bad\nbatch")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(7)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep() -> None:
    time.sleep(1000)


MISDEEDS = {deed.__name__: deed for deed in (fail, die, leave, stop, sleep)}


def misbehave(rank: Rank, *, deed: str) -> None:
    """Steps with an all-reduce each; rank 2 misbehaves at step 3."""
    torch.set_num_threads(1)
    groups.join_group(
        rank=rank.rank,
        world_size=rank.world_size,
        device=torch.device("cpu"),
        rendezvous=rank.rendezvous,
        timeout_s=60,
    )
    for step in range(6):
        rank.at(step, "forward")
        if rank.rank == 2 and step == 3:
            MISDEEDS[deed]()
        rank.at(step, "backward")
        Axis.of(None).all_reduce(torch.ones(3))
    groups.leave_group()


def parent(deed: str, folder: Path) -> int:
    """Launch, and print what the parent found out, as JSON."""
    bind_to_loopback()
    started = time.monotonic()
    try:
        main = partial(misbehave, deed=deed)
        launch(main, world_size=4, folder=folder, timeout_s=TIMEOUT_S)
    except RanksFailed as error:
        children = psutil.Process().children(recursive=True)
        found = {"message": error.failure.message, "traceback": error.failure.traceback}
        found |= {"rank": error.failure.rank, "seconds": time.monotonic() - started}
        print(json.dumps(found | {"left": len(children)}))
    return 0


@pytest.mark.parametrize(
    ("deed", "message"),
    [
        ("fail", "rank 2 failed at step 3: ValueError: a bad batch"),
        ("die", "rank 2 was killed by SIGKILL at step 3"),
        ("leave", "rank 2 left with exit code 7 at step 3"),
        *(
            (
                deed,
                f"rank 2 made no progress for 3 s: it is {state}in step 3, forward, "
                "while ranks 0, 1, 3 wait in step 3, backward",
            )
            for deed, state in (("stop", "stopped "), ("sleep", ""))
        ),
    ],
)
def test_the_culprit_is_named_and_no_rank_is_left(deed, message, tmp_path):
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    done = run_forked(parent, deed, meeting, output=tmp_path / "output")
    found = json.loads(done.stdout)
    assert found["message"] == message
    assert found["rank"] == 2
    assert found["left"] == 0
    assert found["seconds"] < (TIMEOUT_S if deed in ("fail", "die", "leave") else TIMEOUT_S + 5) + 5
    assert ("in misbehave" in found["traceback"]) == (deed == "fail")  # its own, not a peer's
    assert not list(meeting.iterdir())


class Running:
    """`python -m torchpar` on a long run, past its first steps."""

    def __init__(self, folder: Path, *arguments: str):
        self.folder = folder
        write_json(folder / record.REQUEST, Request(engine="torch-manual", experiment=LONG, timeout_s=60))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torchpar", str(folder), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=ENVIRONMENT,
        )
        deadline = time.monotonic() + 60
        part = folder / record.STEPS_PART
        while not (part.is_file() and part.read_bytes().count(b"\n") > 3):
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        self.ranks = psutil.Process(self.process.pid).children(recursive=True)
        assert len(self.ranks) == 4

    def end(self) -> str:
        """Wait for the end, and that no rank is left. Returns stderr."""
        _, errors = self.process.communicate(timeout=20)
        _, alive = psutil.wait_procs(self.ranks, timeout=5)
        assert not alive
        return errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_all_ranks_quietly(number, tmp_path):
    running = Running(tmp_path)
    running.process.send_signal(number)
    assert running.end() == ""
    assert running.process.returncode == 128 + number
    assert not list(tmp_path.glob(".rendezvous*"))


def test_killed_parent_takes_its_ranks_with_it(tmp_path):
    running = Running(tmp_path)
    if sys.platform == "linux":
        running.ranks[2].suspend()
    running.process.kill()
    running.end()


def test_end_of_stdin_ends_everything(tmp_path):
    running = Running(tmp_path, "--exit-with-stdin")
    running.ranks[1].suspend()  # a stopped rank notices nothing by itself
    running.end()  # communicate() closes stdin
    assert running.process.returncode == 128 + signal.SIGTERM


def test_killed_rank_of_a_real_run(tmp_path):
    running = Running(tmp_path)
    running.ranks[1].kill()
    errors = running.end()
    assert running.process.returncode == 1
    failure = read_failure(tmp_path)
    assert failure is not None
    assert failure.message.startswith("rank 1 was killed by SIGKILL at step ")
    assert errors.strip() == failure.message
    assert not (tmp_path / record.MANIFEST).exists()


def test_one_rank_under_torchruns_environment(tmp_path):
    short = Experiment(model=LONG.model, train=Train(max_iters=3, batch_size=8))
    write_json(tmp_path / record.REQUEST, Request(engine="torch-library", experiment=short))
    command = [sys.executable, "-m", "torchpar", str(tmp_path)]
    variables = {**ENVIRONMENT, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=variables, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(read_record(tmp_path).steps) == 3
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**variables, "WORLD_SIZE": "2"}, timeout=60
    )
    assert done.returncode == 3
    assert "WORLD_SIZE = 2" in done.stderr
    assert "1 device" in done.stderr
