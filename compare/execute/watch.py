"""Watching an engine from outside: its steps as they come, and whether it is alive."""

import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from compare.contract import record as files
from compare.contract.record import Failure, Step
from compare.execute.failures import LOG
from compare.execute.launchers import HERE, Hosts
from compare.side.ending import STOP_SIGNAL, STOPPED, StopRequest
from compare.side.process_states import describe_hang, read_states
from compare.system.facts import Activity, is_stopped, look_s

POLL_S = 0.05
BEFORE_FIRST_STEP = f"stopped before its first step, as asked by {STOP_SIGNAL.name}; nothing is saved"
NOT_STARTED = "nothing yet"
"""Where a process is that somebody has still to start."""
TOLD_S = 5.0  # for an engine to end once it has told why; its launcher may wait for a lost host
GRACE_S = 15.0  # an engine times itself out first: it knows which rank hangs, we only know that nothing moves


def watch(
    process: subprocess.Popen,
    folder: Path,
    hosts: Hosts = HERE,
    *,
    timeout_s: float,
    on_step: Callable[[Step], None],
) -> Failure | None:
    """Wait for the process, passing on its steps. Returns why it has to be ended, if it does not end.

    An engine knows best whether it hangs: it tells a compilation from a step. This is for one that cannot
    even say so: its process is stopped, or it neither finishes a step nor computes. Whether processes on
    other hosts compute is not seen: they are only judged from their first step on, or if they do not start.
    If this process was asked to end, the engine is, once it has a state to save.
    """
    patience_s = timeout_s + GRACE_S
    activity = Activity(process.pid)
    offset, seen, moved = 0, 0, False
    begun = last_sign = last_look = time.monotonic()
    while True:
        ended = process.poll() is not None  # asked before reading, so that the last steps are read
        steps, offset = _steps_after(offset, folder)
        for step in steps:
            on_step(step)
            seen, moved = seen + 1, True
        if ended:
            return None
        if StopRequest.came:
            if not seen:
                return Failure(message=BEFORE_FIRST_STEP, exit_code=STOPPED)
            StopRequest.came = False
            # srun passes it on; what else starts processes would die of it.
            starts_others = hosts.several and hosts.launcher != "slurm"
            for asked in psutil.Process(process.pid).children() if starts_others else [process]:
                asked.send_signal(STOP_SIGNAL)
        if time.monotonic() - last_look > look_s(timeout_s):
            last_look = time.monotonic()
            starts = hosts.launcher != "local" and not seen
            if (activity.is_busy() or moved or starts) and not is_stopped(process.pid):
                last_sign = last_look
            moved = False
            if files.read_failure(folder) and time.time() - (folder / files.ERROR).stat().st_mtime > TOLD_S:
                return Failure(message=f"it failed, and did not end within {TOLD_S:g} s")
            if starts and last_look - begun > patience_s:
                states = read_states(folder)
                absent = [number for number, state in states.items() if state.where == NOT_STARTED]
                if absent:
                    return describe_hang(states, absent, timeout_s=patience_s, state="did not start")
        if time.monotonic() - last_sign > patience_s:
            stopped = is_stopped(process.pid)
            does = "is stopped (SIGSTOP, or a debugger)" if stopped else "computes nothing"
            said = f"no progress for {patience_s:.0f} s after {seen} steps: process {process.pid} {does}"
            return Failure(message=f"{said}, so it was ended: see {folder / LOG}, or raise --timeout_s")
        time.sleep(POLL_S)


def _steps_after(offset: int, folder: Path) -> tuple[list[Step], int]:
    """The steps beyond a place of the steps file, which is renamed when the run ends; and the new place."""
    for name in (files.STEPS_PART, files.STEPS):
        with contextlib.suppress(FileNotFoundError), (folder / name).open("rb") as file:
            file.seek(offset)
            lines = file.read().rpartition(b"\n")[0]
            steps = [files.decode_json(line, Step) for line in lines.splitlines()]
            return steps, offset + len(lines) + 1 if lines else offset
    return [], offset
