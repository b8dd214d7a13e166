"""Watching an engine from outside: its steps as they come, and whether it is alive."""

import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from compare.contract import record as files
from compare.contract.record import Step
from compare.host.facts import Activity, look_s

POLL_S = 0.05
GRACE_S = 15.0  # an engine times itself out first: it knows which rank hangs, we only know that nothing moves


def watch(
    process: subprocess.Popen,
    folder: Path,
    *,
    timeout_s: float,
    on_step: Callable[[Step], None],
    elsewhere: bool = False,
) -> str:
    """Wait for the process, passing on its steps. Returns what is wrong if it hangs, else ''.

    An engine knows best whether it hangs: it tells a compilation from a step. This is for one that cannot
    even say so: its process is stopped, or it neither finishes a step nor computes. Whether processes on
    other hosts compute is not seen (`elsewhere`): they are only judged from their first step on.
    """
    patience_s = timeout_s + GRACE_S
    activity = Activity(lambda: _cpu_seconds(process.pid))
    seen, moved = 0, False
    last_sign = last_look = time.monotonic()
    with _StepTail(folder) as tail:
        while True:
            ended = process.poll() is not None  # asked before reading, so that the last steps are read
            for step in tail.read():
                on_step(step)
                seen, moved = seen + 1, True
            if ended:
                return ""
            if time.monotonic() - last_look > look_s(timeout_s):
                last_look = time.monotonic()
                starts = elsewhere and not seen
                if (activity.is_busy() or moved or starts) and not _is_stopped(process.pid):
                    last_sign = last_look
                moved = False
            if time.monotonic() - last_sign > patience_s:
                does = (
                    "is stopped (SIGSTOP, or a debugger)" if _is_stopped(process.pid) else "computes nothing"
                )
                return (
                    f"no progress for {patience_s:.0f} s after {seen} steps: process {process.pid} {does}, "
                    "so it was ended"
                )
            time.sleep(POLL_S)


def _is_stopped(pid: int) -> bool:
    """True for a process that is suspended: SIGSTOP, a debugger. Its children may go on."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


def _cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and all that it started, as far as they live, and of their ended children."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for member in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = member.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
    return total


class _StepTail:
    """Follows a steps file as it grows; the open file outlives its renaming."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._file = None
        self._partial = b""

    def __enter__(self) -> "_StepTail":
        return self

    def __exit__(self, *error: object) -> None:
        if self._file:
            self._file.close()

    def read(self) -> list[Step]:
        """The steps completed since the last call."""
        for name in (files.STEPS_PART, files.STEPS):
            if self._file is None and (self._folder / name).is_file():
                with contextlib.suppress(FileNotFoundError):  # renamed just now: the next name has it
                    self._file = (self._folder / name).open("rb")
        if self._file is None:
            return []
        *lines, self._partial = (self._partial + self._file.read()).split(b"\n")
        return [files.decode_json(line, Step) for line in lines]
