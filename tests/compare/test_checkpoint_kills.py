"""A kill at any moment of a run that saves after every step: what is left is whole, and goes on."""

import random
import signal
import time

import processes
import psutil
import pytest
import warm
from grid import TEXT
from processes import PATIENCE_S, assert_gone, in_order, wait_for

from compare.checkpoint.description import CHECKPOINTS, UNFINISHED, checkpoints_in
from compare.checkpoint.reader import CheckpointReader

SMALL = (
    *("--model.n_layer", "1", "--model.n_head", "2", "--model.n_embd", "16", "--model.block_size", "16"),
    *("--data.source", str(TEXT), "--no_ladder"),
)
ENDLESS = (*SMALL, "--train.max_iters", "1000000", "--layout.dp_shard", "2", "--layout.zero", "3")
KILLS = 2


def victim(engine: str, members: list[psutil.Process]) -> psutil.Process:
    """A rank, or all there is."""
    side, *ranks = members
    return ranks[1] if engine.startswith("torch") else side


@pytest.mark.parametrize("engine", ["torch-manual", "jax-compiler"])
def test_a_kill_at_any_moment_leaves_whole_checkpoints(shardpair, engine):
    moments = random.Random(0)
    for attempt in range(KILLS):
        folder = shardpair.folder / f"killed-{attempt}"
        saving = ("--checkpoint.every", "1", "--checkpoint.keep", "2")
        process = processes.start(
            shardpair.command("run", "demo", "--engines", engine, "--run_dir", str(folder), *ENDLESS, *saving)
        )
        own = folder / engine / CHECKPOINTS
        wait_for(lambda own=own: len(checkpoints_in(own)) == 2, process)
        (started,) = warm.program(process.pid).children()
        side = warm.program(started.pid)
        members = [side, *in_order(side.children())]
        time.sleep(moments.uniform(0, 0.2))
        victim(engine, members).send_signal(signal.SIGKILL)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert_gone(members)
        assert process.returncode == 1
        assert "killed by SIGKILL" in errors
        assert not list(own.glob(f"*{UNFINISHED}"))
        left = checkpoints_in(own)
        assert 2 <= len(left) <= 3  # an old one is removed after a new one is there
        for path in left.values():
            CheckpointReader(path).verify()
    newest = max(left)
    done = shardpair(
        *("resume", str(folder / engine), "--engines", engine, "--train.max_iters", str(newest + 2)),
        "--no_ladder",
    )
    assert done.returncode == 0, done.stderr
    assert f"step {newest}" in done.stdout or f"{engine} ran alone" in done.stdout


def test_a_run_over_an_old_one_keeps_its_checkpoints(shardpair):
    """`python -m SIDE RUN_DIR` twice: the second would mix its own with the first one's."""
    arguments = ("run", "demo", "--engines", "jax-manual", "--run_dir", "twice", "--train.max_iters", "2")
    done = shardpair(*arguments, *SMALL, "--checkpoint.every", "2")
    assert done.returncode == 0, done.stderr
    own = shardpair.folder / "twice" / "jax-manual"
    again = processes.run([shardpair.command("run")[0], "-m", "jaxpar", str(own)], cwd=shardpair.folder)
    assert again.returncode == 2
    assert "holds checkpoints of an earlier run" in again.stderr
    assert list(checkpoints_in(own / CHECKPOINTS)) == [2]
