"""A run of torch-manual that goes on until something happens to it."""

import subprocess
from pathlib import Path

from compare.contract.record import STEPS_PART
from compare.contract.request import REQUEST, Request
from compare.spec.experiment import Experiment, Layout, Model, Train
from compare.system.json_files import write_json
from tests.support.processes import wait_for


def ask(folder: Path, *, devices: int, timeout_s: float = 600.0) -> None:
    """Leave a request for a run of a million steps on so many devices (1 to 4)."""
    experiment = Experiment(
        model=Model(n_layer=1, n_head=2, n_embd=16, block_size=16),
        train=Train(max_iters=1_000_000, batch_size=12),
        layout=Layout(dp_replicate=devices),
    )
    write_json(folder / REQUEST, Request(engine="torch-manual", experiment=experiment, timeout_s=timeout_s))


def wait_for_steps(folder: Path, process: subprocess.Popen, count: int = 4) -> None:
    """Wait until an engine has made so many steps in a folder."""
    wait_for(lambda: steps(folder) >= count, process)


def steps(folder: Path) -> int:
    """How many steps an engine has made in a folder so far."""
    part = folder / STEPS_PART
    return part.read_bytes().count(b"\n") if part.is_file() else 0
