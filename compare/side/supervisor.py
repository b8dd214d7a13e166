"""The supervisor of a process: it ends the process on an error, a signal or a hang, and records the cause.

Every process of a run has a supervisor: jaxpar's process on each host, and each rank of torchpar, whether
`torchpar.launch` forked it or torchrun or SLURM started it. It finds a hang from inside, where a compilation
differs from a step:

    outside of steps   imports, compilation and set-up may take any time, as long as the process computes
    in a step          each phase has to end within `timeout_s`

When nothing has changed for `timeout_s`, the supervisors compare the states of all processes. They name the
processes that do not answer, or else the processes that are behind.
"""

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from msgspec.structs import replace

from compare.contract.record import Failure, leave_failure
from compare.side.ending import FAILED, DivergedError, StoppedEarly, explained_failure
from compare.side.process_states import (
    POLL_S,
    Heartbeat,
    State,
    dead_processes,
    describe_hang,
    numbered,
    read_cause,
    read_states,
    write_state,
)
from compare.spec.experiment import ExperimentError, one_line
from compare.system.facts import Activity, look_s
from compare.system.signals import describe_exit, on_signals

ALIKE = ExperimentError | DivergedError | StoppedEarly
"""Errors that all processes of a run raise together."""
GRACE_S = 3.0  # for the process to blame to write its error, or to be found dead
STUCK_S = 10.0  # beyond the time-out: Python itself does not run, so the supervisor cannot act
LOOKS = 6
SETTLED_S = 6.0
"""Processes begin to wait at different times, and each looks once in a second. One may notice the time-out so
much later than another. It is less than STUCK_S."""


@dataclass(kw_only=True)
class Supervisor:
    """Ends its process on an error, a signal or a hang."""

    side: str
    folder: Path
    """All processes write their states there; without a parent also error.json."""
    number: int = 0
    count: int = 1
    """The number of processes of the run."""
    noun: str = "process"
    timeout_s: float = 600.0
    is_consequence: Callable[[BaseException], bool] = lambda error: False
    """True for an error that only reports the loss of another process."""
    has_parent: bool = False
    """True if a parent waits for the exit codes, prints the cause and ends all processes."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    begun: Callable[[], dict[str, int]] = dict
    """The collectives that the device has begun, for `State.begun`."""

    def run(self, work: Callable[[], None]) -> None:
        """Do `work` in the main thread. An error, a signal or a hang ends the process with the cause."""
        if self.has_parent:  # a terminal sends SIGINT to the parent, too
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        on_signals([signal.SIGINT, signal.SIGTERM], self._end_by_signal)
        self._write_state()
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            work()
        except Exception as error:
            self._fail(error)

    @property
    def is_alone(self) -> bool:
        """True for the only process of a run, which writes no states."""
        return self.count == 1 and not self.has_parent

    @property
    def name(self) -> str:
        """The process in a message; '' if it is alone."""
        host = "" if self.has_parent else f" on {socket.gethostname()}"
        return "" if self.is_alone else f"{self.noun} {self.number}{host}"

    def failure_of(self, error: BaseException) -> Failure:
        """The Failure of an error that ended the work."""
        failure = explained_failure(error, None if self.has_parent else self.folder)
        if failure and (not self.name or isinstance(error, ALIKE)):
            return failure
        message = failure.message if failure else f"{type(error).__name__}: {one_line(error)}"
        return Failure(
            message=f"{self.name} failed {self.heartbeat.when}: {message}" if self.name else message,
            traceback="" if failure else "".join(traceback.format_exception(error)),
            rank=-1 if self.is_alone else self.number,
            is_consequence=not failure and self.is_consequence(error),
            exit_code=failure.exit_code if failure else FAILED,
        )

    def _fail(self, error: Exception) -> NoReturn:
        """End this process after an error. If the error is a consequence, wait for the cause."""
        if isinstance(error, ALIKE):  # a launcher ends all processes with the first that fails
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        failure, deadline = self.failure_of(error), time.monotonic() + GRACE_S
        cause = None
        while failure.is_consequence and not self.has_parent and not cause and time.monotonic() < deadline:
            time.sleep(POLL_S)
            cause = self._find_cause()
        self._end(cause or failure)

    def _end_by_signal(self, number: int) -> NoReturn:
        """End this process after a signal: a launcher ends the other processes so, once one has failed."""
        code = 128 + number
        ended = describe_exit(code, when=self.heartbeat.when)
        message = f"{self.name} was {ended}" if self.name else ended
        rank = -1 if self.is_alone else self.number
        failure = Failure(message=message, rank=rank, is_consequence=True, exit_code=code)
        self._end(self._find_cause() or failure)

    def _find_cause(self) -> Failure | None:
        """A failure that another process wrote, or the death of a process on this host."""
        dead = dead_processes(self.folder)  # before the failures: a process writes, then ends
        cause, states = read_cause(self.folder), read_states(self.folder)
        silent = [number for number in dead if not states[number].failure]
        if cause or self.has_parent or not silent:
            return cause
        who = f"{numbered(self.noun, silent)} on {states[silent[0]].host}"
        died = f"{who} died {self.heartbeat.when} and wrote no error: killed (perhaps out of memory)"
        return Failure(message=died, rank=silent[0])

    def _watch(self) -> NoReturn:
        """End this process once nothing has changed for the time-out."""
        activity, looks = Activity(), 0
        before, since = (self.heartbeat.beats, looks), time.monotonic()
        while True:
            faulthandler.dump_traceback_later(self.timeout_s + STUCK_S, exit=True)
            time.sleep(look_s(self.timeout_s))
            if not self.heartbeat.in_step and activity.is_busy():
                looks += 1
                self._write_state(looks=looks)
            if (now := (self.heartbeat.beats, looks)) != before:
                before, since = now, time.monotonic()
            elif time.monotonic() - since > self.timeout_s:
                if failure := self.find_hang(looks):
                    self._end(failure)
                since = time.monotonic()

    def find_hang(self, looks: int = 0) -> Failure | None:
        """The Failure of a hang, as every supervisor finds it; None while another process computes."""
        before = read_states(self.folder)
        self._write_state(looks=looks, waits=True, begun=self.begun())
        states, silent = {self.number: self._state()}, []
        for _ in range(LOOKS if self.count > 1 else 0):
            time.sleep(SETTLED_S / LOOKS)
            if cause := read_cause(self.folder):
                return cause
            states = read_states(self.folder)
            if any(state.looks > before[n].looks for n, state in states.items() if n in before):
                self._write_state(looks=looks)
                return None
            silent = [n for n in range(self.count) if n not in states or not states[n].waits]
            if not silent:
                break
        failure = describe_hang(states, silent, timeout_s=self.timeout_s, noun=self.noun)
        stack = "".join(traceback.format_stack(sys._current_frames()[threading.main_thread().ident or 0]))
        if self.is_alone:
            return replace(failure, traceback=stack)
        print(f"{self.name} waits in\n{stack}", end="", file=sys.stderr, flush=True)
        return failure

    def _state(self) -> State:
        return State(number=self.number, where=self.heartbeat.where, beats=self.heartbeat.beats)

    def _write_state(self, **more: object) -> None:
        if not self.is_alone:
            write_state(self.folder, replace(self._state(), **more))

    def _end(self, failure: Failure) -> NoReturn:
        """Record the failure and end this process.

        A process that has met no other writes no error.json: the folder may belong to another run.
        """
        if not self.has_parent:
            print(f"{self.side}: {failure.message}\n{failure.traceback}", end="", file=sys.stderr, flush=True)
            if self.number == 0 or self.heartbeat.beats:
                leave_failure(self.folder, failure)
        self._write_state(failure=failure)
        sys.stdout.flush()
        os._exit(failure.exit_code)  # destructors of a broken process group may block
