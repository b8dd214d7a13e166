"""Two hosts with a link of their own, between which it is cut: what is said, and that nothing is left."""

import re
import sys
import time
from pathlib import Path

import processes
from net_hosts import NetHosts, net_hosts
from processes import PATIENCE_S, wait_for

from compare.contract.record import STEPS_PART, read_failure
from compare.contract.request import REQUEST, Request
from compare.host.json_files import write_json
from compare.spec.experiment import Experiment, Layout, Model, Train

ROOT = Path(__file__).parents[2]


def start(hosts: NetHosts, engine: str, side: str, folder: Path, *, timeout_s: float) -> list:
    """One process on each host, as a user starts them by hand; they train until something happens."""
    experiment = Experiment(
        model=Model(n_layer=1, n_head=2, n_embd=16, block_size=16),
        train=Train(max_iters=1_000_000, batch_size=4),
        layout=Layout(dp_replicate=2),
    )
    write_json(folder / REQUEST, Request(engine=engine, experiment=experiment, timeout_s=timeout_s))
    place = ["--coordinator", f"{hosts.address(0)}:29511", "--processes", "2", "--process"]
    run = [sys.executable, "-m", side, str(folder), *place]
    started = [processes.start(hosts.command(k, [*run, str(k)]), cwd=ROOT) for k in range(2)]
    part = folder / STEPS_PART
    wait_for(lambda: part.is_file() and part.read_bytes().count(b"\n") > 3, started[0])
    return started


def test_a_cut_link_is_outlived_and_one_that_stays_cut_is_named(tmp_path):
    with net_hosts(2) as hosts:
        both = start(hosts, "torch-manual", "torchpar", tmp_path, timeout_s=5.0)
        part = tmp_path / STEPS_PART
        hosts.unplug(1)
        time.sleep(1.0)
        hosts.plug(1)
        before = part.read_bytes().count(b"\n")
        wait_for(lambda: part.read_bytes().count(b"\n") > before + 3, both[0])
        hosts.unplug(1)
        ended = [process.communicate(timeout=PATIENCE_S) and process.returncode for process in both]
        assert ended == [1, 1]
    failure = read_failure(tmp_path)
    assert failure is not None
    assert re.fullmatch(
        r"no process made progress for 5 s: all wait in step \d+, \w+, on host0, host1: is the link between "
        r"them cut\?|process \d on host\d is still in step .*",
        failure.message,
    )
