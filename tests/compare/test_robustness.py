"""A rank or a side that dies or hangs, Ctrl-C, a killed launcher: what is said, the exit code, no orphan."""

import os
import signal
import sys

import processes
import pytest
import warm
from grid import TEXT
from processes import PATIENCE_S, assert_gone, in_order, wait_for

from compare.contract.record import STEPS_PART, read_failure

ENDLESS = (
    *("--train.max_iters", "1000000", "--train.batch_size", "6", "--layout.dp_replicate", "3"),
    *("--model.n_layer", "1", "--model.n_head", "2", "--model.n_embd", "16", "--model.block_size", "16"),
    *("--data.source", str(TEXT), "--no_ladder"),
)
IMPATIENT = """
import sys
from compare.cli import main
from compare.execute import watch
watch.GRACE_S = 0  # of the harness, for an engine to say first what it knows: one that is stopped cannot
sys.exit(main())
"""


@pytest.fixture
def real_pythons(shardpair):
    """`shardpair` with interpreters as a user has them."""
    shardpair.python = sys.executable
    return shardpair


class Running:
    """A `shardpair run` that goes on until something happens to it."""

    def __init__(self, shardpair, engine: str, *arguments: str, script: str = ""):
        self.folder = shardpair.folder / "endless"
        command = shardpair.command(
            "run", "demo", "--engines", engine, "--run_dir", str(self.folder), *ENDLESS, *arguments
        )
        if script:
            command[1:3] = ["-c", script]
        # A session of its own: a signal to its group is what Ctrl-C in a terminal is.
        self.process = processes.start(command)
        self.record = self.folder / engine
        part = self.record / STEPS_PART
        wait_for(lambda: part.is_file() and part.stat().st_size, self.process)
        (started,) = warm.program(self.process.pid).children()
        self.side = warm.program(started.pid)
        self.ranks = in_order(self.side.children())
        """The forked ranks of a torch engine, in order."""

    def end(self, *, may_leave_parts: bool = False) -> tuple[int, str]:
        """Wait for the end. Returns the exit code and stderr; neither a process nor a remain may be left.

        Args:
            may_leave_parts: the engine is killed, too, and perhaps while it writes a file.
        """
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        assert_gone([self.side, *self.ranks])
        assert "Traceback" not in errors
        names = [path.name for path in self.record.iterdir()]
        remains = (".rendezvous",) if may_leave_parts else (".rendezvous", ".tmp")
        assert not [name for name in names for remain in remains if remain in name]
        return self.process.returncode, errors


def test_ended_rank_is_named_and_nothing_is_left(shardpair):
    run = Running(shardpair, "torch-manual")
    assert len(run.ranks) == 3
    run.ranks[1].kill()
    code, errors = run.end()
    assert code == 1
    assert "torch-manual: rank 1 was killed by SIGKILL at step " in errors


def test_hung_rank_is_named_after_the_timeout(shardpair):
    run = Running(shardpair, "torch-manual", "--timeout_s", "3")
    run.ranks[2].send_signal(signal.SIGSTOP)
    code, errors = run.end()
    assert code == 1
    assert "rank 2 stopped: no progress for 3 s" in errors


@pytest.mark.parametrize(
    ("engine", "number", "message"),
    [
        ("jax-manual", signal.SIGKILL, "killed by SIGKILL"),
        ("torch-manual", signal.SIGTERM, "ended by SIGTERM"),
    ],
)
def test_ended_side_is_reported(shardpair, engine, number, message):
    run = Running(shardpair, engine)
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


@pytest.mark.parametrize("engine", ["torch-manual", "jax-compiler"])
def test_ctrl_c_ends_everything(real_pythons, engine):
    run = Running(real_pythons, engine)
    os.killpg(run.process.pid, signal.SIGINT)
    code, errors = run.end()
    assert code == 130
    assert "interrupted" in errors


def test_sigterm_ends_everything(shardpair):
    run = Running(shardpair, "torch-manual")
    run.process.terminate()
    code, errors = run.end()
    assert code > 128
    assert "every process was ended" in errors


@pytest.mark.parametrize("engine", ["torch-manual", "jax-compiler"])
def test_killed_launcher_leaves_no_orphan(shardpair, engine):
    run = Running(shardpair, engine)
    warm.program(run.process.pid).kill()
    assert run.end(may_leave_parts=True)[0] == -signal.SIGKILL
