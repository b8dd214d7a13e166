"""A rank that dies or hangs, Ctrl-C, a killed launcher: the first error, the right exit code, no orphan."""

import json
import os
import signal
import subprocess
import time

import psutil
import pytest

from compare.contract.record import STEPS_PART

ENDLESS = (
    "--train.max_iters",
    "1000000",
    "--model.n_layer",
    "1",
    "--layout.dp_replicate",
    "3",
    "--train.batch_size",
    "6",
)


class Running:
    """A `shardpair run` that goes on until something happens to it."""

    def __init__(self, shardpair, engine: str, *arguments: str):
        self.folder = shardpair.folder / "endless"
        command = shardpair.command(
            "run", "demo", "--engines", engine, "--run_dir", str(self.folder), *ENDLESS, *arguments
        )
        # A session of its own: a signal to its group is what Ctrl-C in a terminal is.
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self._wait_for_steps(self.folder / engine / STEPS_PART)
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def _wait_for_steps(self, path) -> None:
        for _ in range(1200):
            if path.is_file() and path.stat().st_size:
                return
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.1)
        pytest.fail("no step was ever recorded")

    @property
    def ranks(self) -> list[psutil.Process]:
        """The forked ranks of a torch engine, in order."""
        side = self.children[0]
        return sorted(side.children(), key=lambda process: process.pid)

    def end(self) -> tuple[int, str, float]:
        """Wait for the end. Returns the exit code, stderr, and seconds; no process may be left."""
        started = time.monotonic()
        _, errors = self.process.communicate(timeout=60)
        seconds = time.monotonic() - started
        _, alive = psutil.wait_procs(self.children, timeout=5)
        assert not alive, f"left behind: {alive}"
        return self.process.returncode, errors, seconds


@pytest.mark.parametrize("engine", ["torch-manual", "torch-library"])
def test_killed_rank_is_named_and_nothing_is_left(shardpair, engine):
    run = Running(shardpair, engine)
    assert len(run.ranks) == 3
    run.ranks[1].send_signal(signal.SIGKILL)
    code, errors, seconds = run.end()
    assert code == 1
    assert "rank 1 was killed by SIGKILL" in errors.splitlines()[-2]
    assert seconds < 10


def test_hung_rank_is_named_after_the_timeout(shardpair):
    run = Running(shardpair, "torch-manual", "--timeout_s", "4")
    run.ranks[2].send_signal(signal.SIGSTOP)
    code, errors, seconds = run.end()
    assert code == 1
    assert "rank 2 made no progress for" in errors.splitlines()[-2]
    assert 3 < seconds < 20


def test_killed_jax_process_is_reported(shardpair):
    run = Running(shardpair, "jax-manual")
    run.children[0].send_signal(signal.SIGKILL)
    code, errors, _ = run.end()
    assert code == 1
    assert "jax-manual: killed by SIGKILL" in errors


def test_hung_jax_process_is_ended(shardpair):
    run = Running(shardpair, "jax-manual", "--timeout_s", "20")  # compiling counts as no progress, too
    run.children[0].send_signal(signal.SIGSTOP)
    code, errors, seconds = run.end()
    assert code == 1
    assert "no progress for" in errors
    assert seconds < 60


@pytest.mark.parametrize("engine", ["torch-manual", "jax-compiler"])
def test_ctrl_c_ends_everything(shardpair, engine):
    run = Running(shardpair, engine)
    os.killpg(run.process.pid, signal.SIGINT)
    code, errors, seconds = run.end()
    assert code == 130
    assert "Traceback" not in errors
    assert "interrupted" in errors
    assert seconds < 10


@pytest.mark.parametrize("engine", ["torch-manual", "jax-compiler"])
def test_killed_launcher_leaves_no_orphan(shardpair, engine):
    run = Running(shardpair, engine)
    run.process.kill()
    assert run.end()[0] == -signal.SIGKILL


def test_two_runs_at_once_do_not_collide(shardpair):
    commands = [
        shardpair.command(
            "run", "check", "--engines", "torch-manual", "torch-library", "--layout.dp_replicate", "2",
            "--train.seed", str(seed), "--json",
        )
        for seed in (1, 2)
    ]  # fmt: skip
    runs = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=shardpair.folder
        )
        for command in commands
    ]
    outcomes = []
    for run in runs:
        out, errors = run.communicate(timeout=200)
        assert run.returncode == 0, errors
        outcomes.append(json.loads(out))
    assert outcomes[0]["costs"][0]["final_loss"] != outcomes[1]["costs"][0]["final_loss"]
    assert len(list((shardpair.folder / "runs").iterdir())) == 2
