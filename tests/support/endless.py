"""A run of torch-manual with a million steps, for tests that end it."""

import subprocess
from pathlib import Path

from compare.contract.record import STEPS_PART
from compare.contract.request import REQUEST, Request
from compare.spec.experiment import Experiment, Layout, Model, Train
from compare.system.json_files import write_json
from tests.support.processes import wait_for


def write_request(folder: Path, *, devices: int, timeout_s: float = 600.0) -> None:
    """Write a request for a run of a million steps on 1 to 4 devices."""
    experiment = Experiment(
        model=Model(n_layer=1, n_head=2, n_embd=16, block_size=16),
        train=Train(max_iters=1_000_000, batch_size=12),
        layout=Layout(dp_replicate=devices),
    )
    write_json(folder / REQUEST, Request(engine="torch-manual", experiment=experiment, timeout_s=timeout_s))


def wait_for_steps(folder: Path, process: subprocess.Popen, count: int = 4) -> None:
    """Wait until an engine has made `count` steps in a folder."""
    wait_for(lambda: steps(folder) >= count, process)


def steps(folder: Path) -> int:
    """The number of steps that an engine has made in a folder."""
    part = folder / STEPS_PART
    return part.read_bytes().count(b"\n") if part.is_file() else 0
