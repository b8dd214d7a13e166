"""Why an engine failed, in one line: its own words, those of srun, a signal, or the last line of its log."""

import re
import shutil
from pathlib import Path

from compare.contract import record as files
from compare.contract.ending import FAILED, MEANT
from compare.host.signals import describe_exit

LOG = "log.txt"
ROOM_FOR_WORDS = 64 * 1024  # with less, an engine could not say that the disk is full

_TASK = re.compile(r"^srun: error: (?P<host>[\w.-]+): tasks? (?P<tasks>[\d,\[\]-]+): (?P<how>.+)$", re.M)
_NODE = re.compile(r"^srun: error: Node failure on (?P<host>[\w.,\[\]-]+)$", re.M)
_CANCELLED = re.compile(r"\*\*\* (STEP|JOB) \S+ ON \S+ CANCELLED AT \S+ (?P<why>DUE TO [^*]+? )?\*\*\*")
_BY_SRUN = "Terminating StepId"  # what it cancels from here on it ends because a process failed
_ENDED = ("Terminated", "Exited with exit code")  # as the others end, once one has failed


def why(returncode: int, folder: Path) -> str:
    """Reason of an engine's failure.

    A cause that a process left comes first; one that only saw another process go comes after what the
    launcher saw.
    """
    failure, log = files.read_failure(folder), (folder / LOG).read_text(errors="replace")
    if failure and not failure.is_consequence:
        return failure.message
    if said := seen_by_srun(log) or (failure.message if failure else ""):
        return said
    died, lines = describe_exit(returncode), log.strip().splitlines()
    if returncode < 0 or returncode > 128:
        return died
    if lines:
        return next(
            (line for line in lines if line.startswith(("Fatal Python error", "Timeout ("))), lines[-1]
        )
    if shutil.disk_usage(folder).free < ROOM_FOR_WORDS:
        return f"{folder}: no space left on the device: make room, and run again"
    return f"{died} and no message"


def code_of_cause(returncode: int, folder: Path) -> int:
    """Exit code of an engine that failed: what the failing process left, if it means more than a failure.

    A launcher's own is often that of a process which it ended (srun: the highest of all).
    """
    failure = files.read_failure(folder)
    told = [returncode, *([failure.exit_code] if failure and not failure.is_consequence else [])]
    return next((code for code in told if code in MEANT), FAILED)


def seen_by_srun(log: str) -> str:
    """The first process that failed, and its host, as srun saw it; '' if it says nothing of the kind."""
    if lost := _NODE.search(log):
        return f"SLURM lost {lost['host']} (node failure)"
    if cancelled := _CANCELLED.search(log.partition(_BY_SRUN)[0]):
        return " ".join(["SLURM cancelled the job", *(cancelled["why"] or "").lower().split()])
    for task in _TASK.finditer(log):
        if not task["how"].startswith(_ENDED):
            return f"process {task['tasks']} on {task['host']}: {task['how'].lower()}, says srun"
    return ""
