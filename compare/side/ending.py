"""How a run ends before its last step: exit codes, errors, and the signal that asks for an early stop."""

import signal
from pathlib import Path

from compare.checkpoint.saver import UnfinishedError
from compare.contract.record import Failure
from compare.spec.experiment import ExperimentError, one_line
from compare.system.disk import no_room
from compare.system.facts import MissingDevicesError
from compare.system.tensors import RecordError

DONE, FAILED = 0, 1
BAD_REQUEST = 2
"""The request or an input is invalid; nothing was trained."""
MISSING = 3
"""This machine lacks devices or packages."""
STOPPED = 4
"""The run was asked to stop and saved its state."""
STOP_SIGNAL = signal.SIGUSR1
"""SLURM sends it before a time limit."""


class DivergedError(RuntimeError):
    """A loss or a gradient is not finite. The message is one line: engine, step, and which number."""


class StoppedEarly(Exception):
    """Training was asked to stop. All processes raise it after the same step, whose state is saved."""


class RunFailed(Exception):
    """A process of the run failed; `failure` names it and the cause."""

    def __init__(self, failure: Failure):
        super().__init__(failure.message)
        self.failure = failure


CODES: dict[type[Exception], int] = {
    StoppedEarly: STOPPED,
    DivergedError: FAILED,
    UnfinishedError: FAILED,
    ExperimentError: BAD_REQUEST,
    RecordError: BAD_REQUEST,
    MissingDevicesError: MISSING,
    ImportError: MISSING,
}
"""Exit codes of errors whose message is complete: no traceback is needed."""


def explained_failure(error: BaseException, folder: Path | None = None) -> Failure | None:
    """The Failure of an error whose message is complete, or of a full disk; None for a bug."""
    if isinstance(error, RunFailed):
        return error.failure
    full = no_room(error, folder)
    code = FAILED if full else next((code for kind, code in CODES.items() if isinstance(error, kind)), None)
    return None if code is None else Failure(message=full or one_line(error), exit_code=code)


class StopRequest:
    """The request to stop early, which a signal sets."""

    came = False

    @classmethod
    def listen(cls) -> None:
        """Make STOP_SIGNAL set `came` from now on. Call it in the main thread."""
        signal.signal(STOP_SIGNAL, lambda number, frame: setattr(cls, "came", True))
