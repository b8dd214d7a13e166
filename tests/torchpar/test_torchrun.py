"""Ranks of torchrun: error.json names the rank to blame, whichever rank writes it."""

import os
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest

from compare.contract.record import read_failure
from compare.contract.request import REQUEST, Rung
from compare.side.run_lock import lock_folder
from tests.support import endless, processes
from tests.support.processes import PATIENCE_S, assert_gone
from tests.support.warm import run_forked, start_forked

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def test_killed_rank_is_named(tmp_path):
    endless.write_request(tmp_path, devices=2)
    run = processes.start(
        [sys.executable, *TORCHRUN, "--nproc-per-node", "2", "-m", "torchpar", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    endless.wait_for_steps(tmp_path, run)
    ranks = {int(child.environ()["RANK"]): child for child in psutil.Process(run.pid).children()}
    assert ranks.keys() == {0, 1}
    ranks[1].send_signal(signal.SIGKILL)
    run.communicate(timeout=PATIENCE_S)
    assert_gone(list(ranks.values()))
    failure = read_failure(tmp_path)
    assert failure is not None
    assert failure.rank == 1
    assert failure.message.startswith(f"rank 1 on {socket.gethostname()} died at step ")
    assert not list(tmp_path.glob("*.tmp"))


def be_rank(number: int, port: int, folder: Path) -> int:
    """`python -m torchpar` as one of two ranks. Rank 1 fails at step 3."""
    from torchpar import train
    from torchpar.__main__ import main

    variables = {"RANK": number, "LOCAL_RANK": number, "MASTER_PORT": port}
    variables |= {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ |= {name: str(value) for name, value in variables.items()} | {"MASTER_ADDR": "127.0.0.1"}
    forward_backward = train.forward_backward

    def fail(run, *arguments):
        if number == 1 and run.state.step == 3:
            run.rank.at(3, "forward")
            raise ValueError("a bad batch")
        return forward_backward(run, *arguments)

    train.forward_backward = fail
    sys.argv = ["torchpar", str(folder)]
    return main()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_failed_rank_is_named_by_all(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    endless.write_request(folder, devices=2)
    stale = folder / f"{Rung.GRADIENTS}.safetensors"
    stale.write_bytes(b"of an earlier run")
    port = free_port()
    ended = list(map(processes.ended, [start_forked(be_rank, n, port, folder) for n in range(2)]))
    failure = read_failure(folder)
    assert failure is not None
    assert failure.rank == 1
    assert failure.message == f"rank 1 on {socket.gethostname()} failed at step 3: ValueError: a bad batch"
    for done in ended:
        assert done.returncode == 1
        assert done.stderr.splitlines()[0] == f"torchpar: {failure.message}"
        assert "in fail" in done.stderr
    assert not stale.exists()


@pytest.mark.parametrize("number", [0, 1])
def test_folder_in_use_stays_unchanged(number, tmp_path):
    """Rank 0 locks the folder for all ranks. A rank that never met rank 0 writes no error.json."""
    folder = tmp_path / "run"
    folder.mkdir()
    endless.write_request(folder, devices=3 if number else 2)  # rank 1 fails early: a wrong WORLD_SIZE
    with lock_folder(folder):
        done = run_forked(be_rank, number, free_port(), folder)
    assert done.returncode == (3 if number else 2)
    assert ("WORLD_SIZE = 2" if number else f"{folder} is in use by another run") in done.stderr
    own = ["process-1.json"] if number else []
    assert sorted(path.name for path in folder.iterdir()) == [*own, REQUEST]
