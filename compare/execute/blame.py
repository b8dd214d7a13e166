"""Why an engine failed, in one line: its own words, those of srun, a signal, or the last line of its log."""

import re
import shutil
from pathlib import Path

from compare.contract import record as files
from compare.contract.ending import BAD_REQUEST, FAILED, MISSING, STOPPED
from compare.contract.record import Failure
from compare.host.signals import describe_exit

LOG = "log.txt"
ROOM_FOR_WORDS = 64 * 1024  # with less, an engine could not say that the disk is full

_BY_SRUN = "Terminating StepId"  # what it cancels from here on it ends because a process failed
_CANCELLED = re.compile(r"\*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT [^*]+")
_LOST = re.compile(r"^srun: error: (Node failure on .+|\S+: tasks? \S+: (?!Terminated|Exited with).+)$", re.M)
"""A host, or a task that did not end as the others do once one has failed."""


def why(returncode: int, folder: Path, hung: str = "") -> Failure:
    """Reason of an engine's failure, and its exit code; `hung` is what `watch` said of it.

    A cause that a process left comes first; one that only saw another process go comes after what the
    launcher saw. A launcher's own code is often that of a process which it ended (srun: the highest of all).
    """
    failure, log = files.read_failure(folder), (folder / LOG).read_text(errors="replace")
    own = failure if failure and not failure.is_consequence else None
    if hung:  # an engine may have told, whose launcher still waits for a host
        told = own.message if own else hung
        return Failure(message=f"{told}: see {folder / LOG}, or raise --timeout_s", exit_code=FAILED)
    codes = (returncode, own.exit_code if own else FAILED)
    code = next((code for code in codes if code in (BAD_REQUEST, MISSING, STOPPED)), FAILED)
    if own:
        return Failure(message=own.message, exit_code=code)
    if said := seen_by_srun(log) or (failure.message if failure else ""):
        return Failure(message=said, exit_code=code)
    said, lines = describe_exit(returncode), log.strip().splitlines()
    if 0 <= returncode <= 128:
        if lines:
            fatal = (line for line in lines if line.startswith(("Fatal Python error", "Timeout (")))
            said = next(fatal, lines[-1])
        elif shutil.disk_usage(folder).free < ROOM_FOR_WORDS:
            said = f"{folder}: no space left on the device: make room, and run again"
        else:
            said += " and no message"
    return Failure(message=said, exit_code=code)


def seen_by_srun(log: str) -> str:
    """The first host or process that was lost, in srun's words; '' if it says nothing of the kind."""
    if cancelled := _CANCELLED.search(log.partition(_BY_SRUN)[0]):
        return f"SLURM: {cancelled[0].strip('* ')}"
    lost = _LOST.search(log)
    return f"srun: {lost[1]}" if lost else ""
