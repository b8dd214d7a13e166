"""Two hosts with a link between them, by hand and under SLURM: the message when one is lost."""

import os
import re
import shlex
import sys
import time
from pathlib import Path

import psutil
import pytest

from compare.contract.record import read_failure
from compare.side.processes import Process
from tests.support import endless, processes
from tests.support.endless import steps, wait_for_steps
from tests.support.net_hosts import net_hosts
from tests.support.processes import PATIENCE_S

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_cut_link_is_named_and_a_short_cut_is_not(tmp_path):
    with net_hosts(2, tmp_path) as hosts:
        endless.write_request(tmp_path, devices=2, timeout_s=4.0)
        run = [sys.executable, "-m", "torchpar", str(tmp_path)]  # a user's command on each host
        places = [Process(k, 2, 0, hosts.address(0), 29511).variables for k in range(2)]
        lines = [["env", *(f"{key}={value}" for key, value in place.items()), *run] for place in places]
        both = [processes.start(hosts.command(k, line), cwd=ROOT) for k, line in enumerate(lines)]
        wait_for_steps(tmp_path, both[0])
        hosts.link(1, "down")
        time.sleep(1.0)
        hosts.link(1, "up")
        wait_for_steps(tmp_path, both[0], steps(tmp_path) + 4)
        hosts.link(1, "down")
        ended = [process.communicate(timeout=PATIENCE_S) and process.returncode for process in both]
    assert ended == [1, 1]
    failure = read_failure(tmp_path)
    assert failure is not None
    assert re.search(r"is the link between them cut|process \d on host\d stayed in step", failure.message)


@pytest.mark.slow
def test_printed_line_starts_the_other_host(tmp_path):
    with net_hosts(2, tmp_path) as hosts:
        (tmp_path / "hostfile").write_text("host0\nhost1\n")
        run = ["run", "check", "--launcher", "torchrun", "--hostfile", "hostfile", "--run_dir", "run"]
        small = ["--engines", "torch-manual", "--layout.dp_replicate", "2", "--model.n_layer", "1"]
        options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
        command = [sys.executable, "-m", "compare", *run, *small, "--train.max_iters", "2", "--no_ladder"]
        first, line = processes.start(hosts.command(0, command), **options), ""
        while first.poll() is None and not line.startswith("on host1: "):
            line = first.stderr.readline()
        other = shlex.split(line.removeprefix("on host1: "))
        second = processes.run(hosts.command(1, other), **options)
        _, errors = first.communicate(timeout=PATIENCE_S)
    assert (first.returncode, second.returncode) == (0, 0), errors + second.stderr


@pytest.mark.slow
def test_slurm_names_the_host_of_a_kill(tmp_path):
    with net_hosts(2, tmp_path) as hosts, hosts.slurm() as environment:
        folder = tmp_path / "run"
        run = ["run", "check", "--launcher", "slurm", "--engines", "jax-manual", "--run_dir", str(folder)]
        endless = ["--train.max_iters", "1000000", "--layout.dp_replicate", "2", "--model.n_layer", "1"]
        shardpair = [sys.executable, "-m", "compare", *run, *endless, "--no_ladder"]
        environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        wrong = [*shardpair, "--run_dir", str(tmp_path / "other"), "--launcher_options=--nonsense"]
        refused = processes.run(["salloc", "--quiet", "--nodes=2", *wrong], env=environment, cwd=tmp_path)
        assert refused.returncode == 1
        assert "srun: unrecognized option '--nonsense'" in refused.stderr.splitlines()[-1]
        started = processes.start(
            ["salloc", "--quiet", "--nodes=2", *shardpair], env=environment, cwd=tmp_path
        )
        engine = folder / "jax-manual"
        wait_for_steps(engine, started)
        (second,) = (p for p in sides(engine) if p.environ().get("SLURM_PROCID") == "1")
        second.kill()
        _, errors = started.communicate(timeout=PATIENCE_S)
        assert started.returncode == 1
        assert "srun: error: host1: task 1: Killed" in errors.splitlines()[-1]
        assert not sides(engine)


def sides(folder: Path) -> list[psutil.Process]:
    """The processes of jaxpar with this folder, on all hosts."""
    begin, found = [sys.executable, "-m", "jaxpar", str(folder)], psutil.process_iter(["cmdline"])
    return [process for process in found if (process.info["cmdline"] or [])[:4] == begin]
