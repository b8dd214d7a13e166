"""Processes that tests start, and the check that none outlives its test.

Each inherits a mark in its environment, by which it is found wherever it has gone. Time-outs only end what
hangs: they are made for a machine that does many other things.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable

import psutil
import pytest

PATIENCE_S = 1800.0
GONE_S = 120.0  # for what is about to end
SETTLED_S = 5.0  # a process between fork and exec may have an empty environment
MARK = "SHARDPAIR_TESTS"
MARK_LENGTH = 10
"""Characters of a mark: `warm` replaces it in place."""
# The first code of a process: Ctrl-C reaches it, unlike a script's background job, and it ends if pytest is
# killed (1: PR_SET_PDEATHSIG). A preexec_fn would fork pytest with all its threads.
PRELUDE = """
import ctypes, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execvp(sys.argv[1], sys.argv[1:])
"""

os.environ[MARK] = f"{os.getpid():0{MARK_LENGTH}}"  # a worker of pytest-xdist is a process of its own
FAILED = pytest.StashKey[bool]()
"""Whether the test has failed."""
staying: set[int] = set()
"""Processes that may live from one test to the next."""
_strangers: set[int] = set()  # processes that were looked at and are not ours


def in_order(started: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Processes in the order in which they began. Process numbers wrap around, so they give no order."""
    return sorted(started, key=lambda process: (process.create_time(), process.pid))


def start(command: list[str], **options) -> subprocess.Popen:
    """Start a process as a terminal's foreground would, in a session of its own; its output is text."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen([sys.executable, "-ISc", PRELUDE, *command], **options, start_new_session=True)


def run(command: list[str], **options) -> subprocess.CompletedProcess:
    """Run a process to its end; the result has its output."""
    return ended(start(command, **options))


def ended(process: subprocess.Popen) -> subprocess.CompletedProcess:
    """Wait for the end of a process; the result has its output."""
    try:
        out, errors = process.communicate(timeout=PATIENCE_S)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def wait_for(condition: Callable[[], object], process: subprocess.Popen | None = None) -> None:
    """Wait until a condition holds; fail if the process ends before, or the time is over."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if process and process.poll() is not None:
            pytest.fail(f"it ended with {process.returncode}: {process.communicate()}")
        if time.monotonic() > deadline:
            pytest.fail(f"{condition} did not come true in {PATIENCE_S:g} s")
        time.sleep(0.05)


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=GONE_S)
    assert not alive, f"left behind: {alive}"


def left_behind(*, at_the_end: bool = False) -> list[psutil.Process]:
    """Processes of this session's tests that still live.

    At the end of the session count also what is `staying` from one test to the next.
    """
    now = set(psutil.pids())
    _strangers.intersection_update(now)  # a number that is free again may be one of ours next
    found = []
    for pid in now - _strangers - {os.getpid()}:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process = psutil.Process(pid)
            mark = process.environ().get(MARK)
            is_staying = pid in staying and not at_the_end
            if mark == os.environ[MARK] and not is_staying:
                found.append(process)
            is_young = time.time() - process.create_time() < SETTLED_S  # it may be about to exec
            if mark == os.environ[MARK] or (not mark and is_young):
                continue
        _strangers.add(pid)
    return found


def end_all(*, grace_s: float = GONE_S, at_the_end: bool = False) -> list[str]:
    """End what is left behind, after a time in which it may end by itself. Returns their command lines."""
    left = left_behind(at_the_end=at_the_end)
    if not left:
        return []
    psutil.wait_procs(left, timeout=grace_s)
    stubborn = []
    while left := left_behind(at_the_end=at_the_end):  # a process may start another while it is ended
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                stubborn.append(f"{process.pid}: {' '.join(process.cmdline())}")
                process.kill()
        psutil.wait_procs(left, timeout=GONE_S)
    return stubborn


def no_process_left(request: pytest.FixtureRequest) -> Generator[None]:
    """The fixture of every test: end what one that failed has left; one that passes may leave nothing."""
    yield
    failed = request.node.stash.get(FAILED, False)
    left = end_all(grace_s=0.0 if failed else GONE_S)
    if left and not failed:
        pytest.fail(f"left behind, and now ended: {left}")


class Busy:
    """For `Activity`: a busy machine may keep what computes from computing for seconds."""

    def __init__(self, pid: int | None = None):
        pass

    def is_busy(self) -> bool:
        return True
