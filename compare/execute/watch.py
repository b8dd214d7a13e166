"""Watch an engine from outside: pass its steps on, and end it if it cannot end itself.

An engine finds its own hangs (`compare.side.supervisor`), because it can distinguish a compilation from a
step. This watch is for an engine that cannot, because its process is stopped, or neither writes a step nor
computes.
"""

import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from compare.contract import record as files
from compare.contract.record import Failure, Step
from compare.execute.failures import LOG
from compare.execute.launchers import Hosts
from compare.side.ending import STOP_SIGNAL, STOPPED, StopRequest
from compare.side.process_states import describe_hang, read_states
from compare.system.facts import Activity, is_stopped, look_s

POLL_S = 0.05
STOPPED_EARLY = f"stopped before its first step, as asked by {STOP_SIGNAL.name}; nothing is saved"
NOT_STARTED = "nothing yet"
"""`State.where` of a process that the user has not started."""
ERROR_S = 5.0  # for an engine to end after it wrote an error; its launcher may wait for a lost host
GRACE_S = 15.0  # beyond the time-out: an engine ends itself first, and names the process to blame


def watch(
    process: subprocess.Popen,
    folder: Path,
    hosts: Hosts,
    *,
    timeout_s: float,
    on_step: Callable[[Step], None],
) -> Failure | None:
    """Wait for the process to end. Returns the reason to end it, if it does not end.

    With a launcher other processes may compute on other hosts, which is not visible here. So before the first
    step only processes that have not started count. A request to stop is passed on once the engine has made a
    step.
    """
    patience_s = timeout_s + GRACE_S
    activity = Activity(process.pid)
    part = folder / files.STEPS_PART
    offset = part.stat().st_size if part.exists() else 0  # a run that continues has steps already
    count, moved = 0, False
    begun = last_sign = last_look = time.monotonic()
    while True:
        ended = process.poll() is not None  # before the steps, so that the last steps are read
        steps, offset = _steps_after(offset, folder)
        for step in steps:
            on_step(step)
            count, moved = count + 1, True
        if ended:
            return None
        if StopRequest.came:
            if not count:
                return Failure(message=STOPPED_EARLY, exit_code=STOPPED)
            StopRequest.came = False
            # srun passes the signal on; torchrun and the loopback would end by it.
            starts_others = hosts.several and hosts.launcher != "slurm"
            for receiver in psutil.Process(process.pid).children() if starts_others else [process]:
                receiver.send_signal(STOP_SIGNAL)
        if time.monotonic() - last_look > look_s(timeout_s):
            last_look = time.monotonic()
            starts = hosts.launcher != "local" and not count
            if (activity.is_busy() or moved or starts) and not is_stopped(process.pid):
                last_sign = last_look
            moved = False
            if files.read_failure(folder) and time.time() - (folder / files.ERROR).stat().st_mtime > ERROR_S:
                return Failure(message=f"it failed, and did not end within {ERROR_S:g} s")
            if starts and last_look - begun > patience_s and (failure := _not_started(folder, patience_s)):
                return failure
        if time.monotonic() - last_sign > patience_s:
            does = "is stopped (SIGSTOP, or a debugger)" if is_stopped(process.pid) else "computes nothing"
            hang = f"no progress for {patience_s:.0f} s after {count} steps: process {process.pid} {does}"
            return Failure(message=f"{hang}, so it was ended: see {folder / LOG}, or raise --timeout_s")
        time.sleep(POLL_S)


def _not_started(folder: Path, patience_s: float) -> Failure | None:
    """The Failure of processes that did not start in time."""
    states = read_states(folder)
    if not states:
        return Failure(message=f"srun started no process in {patience_s:g} s: is another step running?")
    absent = [number for number, state in states.items() if state.where == NOT_STARTED]
    if not absent:
        return None
    return describe_hang(states, absent, timeout_s=patience_s, state="did not start")


def _steps_after(offset: int, folder: Path) -> tuple[list[Step], int]:
    """The steps after a position of the steps file, which is renamed at the end; and the new position."""
    for name in (files.STEPS_PART, files.STEPS):
        with contextlib.suppress(FileNotFoundError), (folder / name).open("rb") as file:
            file.seek(offset)
            lines = file.read().rpartition(b"\n")[0]
            steps = [files.decode_json(line, Step) for line in lines.splitlines()]
            return steps, offset + len(lines) + 1 if lines else offset
    return [], offset
