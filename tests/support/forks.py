"""Tests' processes with PyTorch: forks of one server that has imported it.

An interpreter takes four seconds of CPU time to import what a training step needs; a fork, a few hundredths.
"""

import multiprocessing
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import processes
import pytest
import warm
from processes import PATIENCE_S

from compare.contract import record
from compare.contract.request import Request
from compare.host.json_files import write_json

TIMEOUT_S = PATIENCE_S
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "numpy",
        "pytest",
        "torch",
        "torch._dynamo",  # the first step of an optimizer imports it
        "torch.distributed.fsdp",
        "torch.distributed.optim",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
    ]
)


def leave_with_parent() -> None:
    """From now on this fork ends when pytest does, even if it was killed."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_forked(function: Callable[..., int], *arguments: object, output: Path) -> subprocess.CompletedProcess:
    """Run a picklable function, which returns the exit code, in a process of its own, and wait for its end.

    The folder `output` is made, for what the process says.
    """
    output.mkdir()
    process = SERVER.Process(target=_speak_into, args=(output, function, arguments))
    process.start()
    process.join(TIMEOUT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        pytest.fail(f"{function.__name__}{arguments} took more than {TIMEOUT_S:g} s")
    assert process.exitcode is not None
    said = ((output / name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(function.__name__, process.exitcode, *said)


def run_torchpar(folder: Path, request: Request) -> subprocess.CompletedProcess:
    """Leave the request in the folder, and run `python -m torchpar FOLDER`."""
    folder.mkdir(exist_ok=True)
    write_json(folder / record.REQUEST, request)
    return processes.run([warm.python(), "-m", "torchpar", str(folder)])


def _speak_into(folder: Path, function: Callable[..., int], arguments: tuple) -> None:
    leave_with_parent()
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    code = 1
    try:
        code = function(*arguments)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as torchpar's own ends: see groups.leave_group
