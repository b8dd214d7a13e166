"""Why an engine failed, in one line: its own words, those of srun, a signal, or the last line of its log."""

import re
import shutil
from pathlib import Path

from msgspec.structs import replace

from compare.contract import record as files
from compare.contract.record import Failure
from compare.side.ending import BAD_REQUEST, FAILED, MISSING, STOP_SIGNAL, STOPPED
from compare.side.process_states import numbered, read_cause, read_states
from compare.system.signals import describe_exit

LOG = "log.txt"
ROOM_FOR_WORDS = 64 * 1024  # with less, an engine could not say that the disk is full

_BY_SRUN = "Terminating StepId"  # what it cancels from here on it ends because a process failed
_CANCELLED = re.compile(r"\*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT [^*]+")
_LOST = re.compile(r"^srun: error: (Node failure on .+|\S+: tasks? \S+: (?!Terminated|Exited with).+)$", re.M)
"""A host, or a task that did not end as the others do once one has failed."""
_LEFT = re.compile(r"^srun: error: (\S+: tasks? \S+: Exited with .+)$", re.M)
_LABEL = re.compile(r"^ *\d+: ", re.M)
"""Of the task that says a line: `srun --label`."""
_UNHEARD = re.compile(rf"killed by {STOP_SIGNAL.name}|User defined signal 1")
"""An engine was asked to end before it listened."""


def why(returncode: int, folder: Path, ended: Failure | None = None, launcher: str = "") -> Failure:
    """Reason of an engine's failure, and its exit code; `ended` is why the harness ended it.

    A cause that a process left comes first; one that only saw another process go comes after what the
    launcher saw. A launcher's own code is often that of a process which it ended (srun: the highest of all).
    """
    failure, log = files.read_failure(folder), (folder / LOG).read_text(errors="replace")
    own = read_cause(folder)
    srun = seen_by_srun(log)
    if failure and srun and failure.rank == srun.rank != -1:  # its own words say more
        srun = None
    told = own or srun or (failure and _with_the_silent(failure, folder))
    if ended:  # an engine may have told, whose launcher still waits for a host
        own = ended if ended.exit_code == STOPPED or not told else told
        return replace(own, is_consequence=False)
    said = told.message if told else _last_words(returncode, folder, _LABEL.sub("", log), launcher)
    codes = (STOPPED if _UNHEARD.search(said) else returncode, own.exit_code if own else FAILED)
    code = next((code for code in codes if code in (BAD_REQUEST, MISSING, STOPPED)), FAILED)
    return Failure(message=said, exit_code=code, rank=told.rank if told else -1)


def _with_the_silent(consequence: Failure, folder: Path) -> Failure:
    """What a process saw of another's end, beside those of one host, if such there are, that said nothing."""
    silent = [state for state in read_states(folder).values() if not state.failure]
    if len({state.host for state in silent}) != 1:
        return consequence
    who = f"{numbered('process', [state.number for state in silent])} on {silent[0].host}"
    said = f"{who} left without a word: {consequence.message}"
    return replace(consequence, message=said, rank=silent[0].number)


def _last_words(returncode: int, folder: Path, log: str, launcher: str) -> str:
    said, lines = describe_exit(returncode), log.strip().splitlines()
    if not 0 <= returncode <= 128:
        return f"{launcher} was {said}" if launcher else said
    if lines:
        fatal = (line for line in lines if line.startswith(("Fatal Python error", "Timeout (")))
        return next(fatal, lines[-1])
    if shutil.disk_usage(folder).free < ROOM_FOR_WORDS:
        return f"{folder}: no space left on the device: make room, and run again"
    return f"{said} and no message"


def seen_by_srun(log: str) -> Failure | None:
    """The first host or process that was lost, or else that failed, in srun's words; None if it says nothing.

    Of one that failed it says no more than a code: its own last line comes with it.
    """
    before = log.partition(_BY_SRUN)[0]
    if cancelled := _CANCELLED.search(before):
        return Failure(message=f"SLURM: {cancelled[0].strip('* ')}")
    if not (lost := _LOST.search(log) or _LEFT.search(before)):
        return None
    task = re.search(r": tasks? (\d+)", lost[1])
    lines = re.findall(rf"^ *{task[1]}: (.*\S.*)$", log, re.M) if task and lost.re is _LEFT else []
    said = ": ".join([f"srun: {lost[1]}", *lines[-1:]])
    return Failure(message=said, rank=int(task[1]) if task else -1)
