"""Tests' processes with PyTorch: forks of one server that has imported it.

An interpreter takes four seconds of CPU time to import what a training step needs; a fork, a few hundredths.
"""

import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import pytest
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


@dataclass(frozen=True)
class Done:
    """The end of a process, and its output."""

    returncode: int
    stdout: str
    stderr: str


def run_forked(function: Callable[..., int], *arguments: object, output: Path) -> Done:
    """Run a picklable function in a process of its own, and wait for its end.

    Args:
        function: returns the exit code.
        output: a folder, which is made, for what the process says.
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
    return Done(process.exitcode, *((output / name).read_text() for name in ("stdout", "stderr")))


def run_torchpar(folder: Path, request: Request) -> Done:
    """Leave the request in the folder, and do what `python -m torchpar FOLDER` does."""
    folder.mkdir(exist_ok=True)
    write_json(folder / record.REQUEST, request)
    return run_forked(_be_torchpar, folder, output=folder.with_name(f"{folder.name}.output"))


def _be_torchpar(folder: Path) -> int:
    from torchpar.__main__ import main

    sys.argv = ["torchpar", str(folder)]
    return main()


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
