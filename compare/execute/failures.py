"""The cause of an engine's failure, in one line."""

import errno
import re
import shutil
from pathlib import Path

from msgspec.structs import replace

from compare.contract import record as files
from compare.contract.record import Failure
from compare.side.ending import BAD_REQUEST, FAILED, MISSING, STOP_SIGNAL, STOPPED
from compare.side.process_states import numbered, read_cause, read_states
from compare.system.disk import no_room
from compare.system.signals import describe_exit

LOG = "log.txt"
NOISE = re.compile(r"^srun: .*lacks support for cpu binding.*\n?", re.MULTILINE)
"""A line that srun prints first, of each step, where SLURM binds no CPUs. It explains nothing."""
LAUNCHER_ERROR = re.compile(r"^(?:\d+: )?((?:srun: (?:error|fatal|unrecognized)|slurmstepd).*)", re.MULTILINE)
"""A line in which SLURM reports a lost process or host, a time limit or a wrong option, without a label."""
PRINTED = re.compile(r"^(?:\d+: )?((?:slurmstepd.* execve\(\): |torchpar: |jaxpar: ).*)", re.MULTILINE)
"""A line that names the cause where the process could not write it: no interpreter, or a read-only folder."""
EXITED = re.compile(r"^srun: error: .* Exited with exit code (\d+)", re.MULTILINE)
FATAL = ("Fatal Python error", "Timeout (")
"""Words of faulthandler before a stack."""
KILLED_EARLY = (f"stopped as asked ({STOP_SIGNAL.name})", "User defined signal 1")
"""An engine was asked to stop before it handled the signal."""
FULL_DISK = 64 * 1024  # bytes; with less free space, an engine may write no error


def find_cause(returncode: int, folder: Path, ended: Failure | None = None) -> Failure:
    """The cause of an engine's failure and its exit code; `ended` is the harness's reason to end the engine.

    An error that a process wrote comes first. An error that only reports the loss of another process comes
    with the name of the lost process and SLURM's line about it.
    """
    log = read_log(folder / LOG)
    found = LAUNCHER_ERROR.search(log)
    launcher_error = found[1] if found else ""
    consequence = files.read_failure(folder)
    if ended and ended.exit_code == STOPPED:
        return ended
    if not (cause := read_cause(folder)):
        if consequence:
            cause = _with_lost_process(consequence, folder, launcher_error)
        elif launcher_error:
            printed, exited = PRINTED.search(log), EXITED.search(log)
            code = int(exited[1]) if exited else FAILED
            cause = Failure(message=printed[1] if printed else launcher_error, exit_code=code)
        else:
            cause = ended or Failure(message=_last_words(returncode, folder, log))
    stopped = any(words in cause.message for words in KILLED_EARLY)
    codes = (STOPPED if stopped else cause.exit_code, returncode)
    return replace(cause, exit_code=next((c for c in codes if c in (BAD_REQUEST, MISSING, STOPPED)), FAILED))


def read_log(path: Path) -> str:
    """The output of an engine's processes, without `NOISE`."""
    return NOISE.sub("", path.read_text(errors="replace"))


def _with_lost_process(consequence: Failure, folder: Path, launcher_error: str) -> Failure:
    """The failure of a process that lost another, with the processes of one host that wrote no error."""
    lost = [state for state in read_states(folder).values() if not state.failure]
    message, rank = consequence.message, consequence.rank
    if len({state.host for state in lost}) == 1:
        who = f"{numbered('process', [state.number for state in lost])} on {lost[0].host}"
        message, rank = f"{who} wrote no error: {message}", lost[0].number
    if launcher_error:
        message = f"{launcher_error}: {message}"
    return Failure(message=message, rank=rank)


def _last_words(returncode: int, folder: Path, log: str) -> str:
    """A fatal error's first line, the last line of the log, or the exit code."""
    lines = log.strip().splitlines()
    if not 0 <= returncode <= 128:
        return describe_exit(returncode)
    if lines:
        return next((line for line in lines if any(words in line for words in FATAL)), lines[-1])
    if shutil.disk_usage(folder).free < FULL_DISK:
        return no_room(OSError(errno.ENOSPC, ""), folder)
    return f"{describe_exit(returncode)} and no message"
