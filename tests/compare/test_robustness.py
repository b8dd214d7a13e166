"""A process that dies or hangs, Ctrl-C, a killed launcher: the message, the saved state, and no orphan."""

import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from compare.checkpoint.description import CHECKPOINTS, UNFINISHED, checkpoints_in
from compare.checkpoint.reader import CheckpointReader
from compare.contract.record import STEPS_PART, read_failure
from compare.side.ending import STOP_SIGNAL, STOPPED
from tests.support import processes, warm
from tests.support.endless import wait_for_steps
from tests.support.grid import TEXT
from tests.support.processes import PATIENCE_S, assert_gone, in_order, wait_for

SMALL = (
    *("--model.n_layer", "1", "--model.n_head", "2", "--model.n_embd", "16", "--model.block_size", "16"),
    *("--data.source", str(TEXT), "--no_ladder", "--train.batch_size", "12"),
)
ENDLESS = (*SMALL, "--train.max_iters", "1000000")
IMPATIENT = """
import sys
from compare.cli import main
from compare.execute import watch
watch.GRACE_S = 0  # a stopped engine cannot end itself first
sys.exit(main())
"""


@pytest.fixture
def real_pythons(shardpair):
    """`shardpair` with real interpreters."""
    shardpair.python = sys.executable
    return shardpair


class Running:
    """A `shardpair run` of a million steps."""

    def __init__(self, shardpair, engine: str, *layout: str, script: str = ""):
        self.folder = shardpair.folder / "endless"
        where = ("--engines", engine, "--run_dir", str(self.folder))
        command = shardpair.command("run", "demo", *where, *ENDLESS, *layout)
        if script:
            command[1:3] = ["-c", script]
        # It has a session of its own. A signal to its group acts as Ctrl-C in a terminal.
        self.process = processes.start(command)
        self.record = self.folder / engine
        wait_for_steps(self.record, self.process)
        (started,) = warm.program(self.process.pid).children()
        self.side = warm.program(started.pid)
        self.ranks = [warm.program(child.pid) for child in in_order(self.side.children())]
        """The forked ranks of a torch engine, or the processes of several hosts, in order."""

    def end(self, *, may_leave_parts: bool = False, may_show_stack: bool = False) -> tuple[int, str]:
        """Wait for the end. Returns the exit code and stderr. No process and no partial file may remain.

        Args:
            may_leave_parts: the engine is killed, too, perhaps while it writes a file.
            may_show_stack: the log may end with the stack of a process that lost another.
        """
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        assert_gone([self.side, *self.ranks])
        assert may_show_stack or "Traceback" not in errors
        remains = (".rendezvous",) if may_leave_parts else (".rendezvous", ".tmp", UNFINISHED)
        names = [path.name for path in self.record.rglob("*") if path.name != STEPS_PART]
        assert not [name for name in names for remain in remains if remain in name]
        return self.process.returncode, errors

    @property
    def kept(self) -> dict[int, Path]:
        return checkpoints_in(self.record / CHECKPOINTS)


@pytest.mark.parametrize(
    ("engine", "number", "message"),
    [
        ("jax-manual", signal.SIGKILL, "killed by SIGKILL"),
        ("torch-manual", signal.SIGTERM, "ended by SIGTERM"),
    ],
)
def test_ended_side_is_reported(shardpair, engine, number, message):
    run = Running(shardpair, engine, "--layout.dp_replicate", "3")
    run.side.send_signal(number)
    code, errors = run.end()
    assert code == 1
    assert f"{engine}: {message}" in errors
    failure = read_failure(run.record)
    assert failure is not None
    assert failure.message.startswith(message)


def test_stopped_side_is_ended(real_pythons):
    run = Running(real_pythons, "jax-manual", "--timeout_s", "3", script=IMPATIENT)
    run.side.send_signal(signal.SIGSTOP)
    code, errors = run.end()
    assert code == 1
    assert f"process {run.side.pid} is stopped (SIGSTOP, or a debugger), so it was ended" in errors


@pytest.mark.parametrize(
    ("engine", "number"), [("jax-compiler", signal.SIGINT), ("torch-manual", signal.SIGTERM)]
)
def test_ctrl_c_or_sigterm_ends_all_processes(real_pythons, engine, number):
    run = Running(real_pythons, engine)
    os.killpg(run.process.pid, number)
    code, errors = run.end()
    assert code == 130
    assert "interrupted; every process was ended" in errors


def test_killed_launcher_leaves_no_orphan(shardpair):
    run = Running(shardpair, "torch-manual")
    warm.program(run.process.pid).kill()
    assert run.end(may_leave_parts=True)[0] == -signal.SIGKILL


@pytest.mark.parametrize("engine", ["torch-manual", "jax-compiler"])
def test_kill_leaves_complete_checkpoints(shardpair, engine):
    """A rank, or the only process, is killed in a run that saves after every step."""
    saving = ("--checkpoint.every", "1", "--checkpoint.keep", "2")
    run = Running(shardpair, engine, "--layout.dp_shard", "2", "--layout.zero", "3", *saving)
    wait_for(lambda: len(run.kept) == 2, run.process)
    time.sleep(random.Random(engine).uniform(0, 0.2))
    (run.ranks[1] if run.ranks else run.side).kill()
    code, errors = run.end()
    assert code == 1
    assert ("rank 1 was killed by SIGKILL at step " if run.ranks else "killed by SIGKILL") in errors
    assert 2 <= len(run.kept) <= 3  # the oldest is removed after the newest is complete
    for path in run.kept.values():
        CheckpointReader(path).verify()
    newest = max(run.kept)
    to_end = ("--train.max_iters", str(newest + 2), "--no_ladder")
    done = shardpair("resume", str(run.record), "--engines", engine, *to_end)
    assert done.returncode == 0, done.stderr
    assert f"step {newest}" in done.stdout or f"{engine} ran alone" in done.stdout


def test_stop_request_reaches_forked_ranks(shardpair):
    run = Running(shardpair, "torch-manual", "--checkpoint.every", "100000", "--layout.dp_replicate", "2")
    warm.program(run.process.pid).send_signal(STOP_SIGNAL)
    code, errors = run.end()
    assert code == STOPPED
    (step,) = run.kept
    assert f"stopped after step {step} of 1000000, as asked by SIGUSR1; its state is saved" in errors


def two_hosts(shardpair, engine: str, *flags: str) -> Running:
    """A run on two hosts that are this machine, with one process each."""
    run = Running(shardpair, engine, "--checkpoint.every", "100000", "--hosts", "2", *flags)
    assert len(run.ranks) == 2
    return run


def test_killed_process_of_two_hosts_is_named(shardpair):
    run = two_hosts(shardpair, "jax-manual")
    run.ranks[1].kill()
    code, errors = run.end(may_show_stack=True)
    assert code == 1
    # The parent of both processes reports the signal, or process 0 that the other process is gone.
    died = r"process 1 on \S+ (was killed by SIGKILL|died at step \d+ and wrote no error: killed)"
    assert re.search(died, errors.splitlines()[-1]), errors
    assert not run.kept


def test_stopped_process_of_two_hosts_is_named(shardpair):
    run = two_hosts(shardpair, "jax-manual", "--timeout_s", "3")
    run.ranks[1].suspend()
    code, errors = run.end(may_show_stack=True)
    assert code == 1
    assert "process 1 gave no answer: no progress for 3 s, while process 0 waited in step " in errors


def test_sigterm_ends_two_hosts(shardpair):
    """JAX's own handler of SIGTERM would train on until SLURM kills it."""
    run = two_hosts(shardpair, "jax-manual")
    for process in run.ranks:
        process.terminate()
    _, errors = run.end(may_show_stack=True)
    assert re.search(r"process [01] on \S+ was ended by SIGTERM", errors.splitlines()[-1]), errors


def test_stop_request_reaches_two_hosts(shardpair):
    run = two_hosts(shardpair, "torch-manual")
    warm.program(run.process.pid).send_signal(STOP_SIGNAL)
    code, errors = run.end(may_show_stack=True)
    assert code == STOPPED
    (step,) = run.kept
    CheckpointReader(run.kept[step]).verify()
    assert f"stopped after step {step} of 1000000, as asked by SIGUSR1; its state is saved" in errors
    assert f"`shardpair run --continue {run.folder}` goes on" in errors.splitlines()[-1]
