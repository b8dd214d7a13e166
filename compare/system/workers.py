"""Worker processes that do one call after another, and the answers of all workers.

The parent sends a call to every worker and waits for every answer. Once one worker has failed, the others get
a short time: they may wait for the failed worker in a collective. A worker answers until its parent hangs up.
"""

import contextlib
import ctypes
import enum
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, NoReturn, Protocol

from compare.system.signals import describe_exit

GRACE_S = 1.0
"""Seconds for the other workers to answer, once one has failed."""
POLL_S = 0.5
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Outcome(enum.IntEnum):
    """The end of a call in one worker. The smallest outcome above DONE is to blame."""

    DONE = 0
    FAILED = 1
    DIED = 2
    LOST = 3
    """Failed because another worker is gone."""
    SILENT = 4


class Answer(NamedTuple):
    """The answer of one worker. `value` is a result, an error (`Failure` or a text), or an exit code."""

    worker: int
    outcome: Outcome
    value: Any


class Failure(NamedTuple):
    """An error of a worker, pickled, and its traceback. The error is empty if it cannot be pickled."""

    error: bytes
    text: str


class WorkerError(RuntimeError):
    """A worker failed, died or hangs."""


class Handle(Protocol):
    """A process that the parent may end, such as `subprocess.Popen`."""

    pid: int

    def kill(self) -> None: ...

    def wait(self) -> int: ...


class Workers:
    """Processes that do the same calls. `start(number)` starts one, and returns it with its connection."""

    def __init__(
        self, count: int, start: Callable[[int], tuple[Handle, Connection]], *, noun: str = "rank"
    ) -> None:
        self.noun = noun
        self.members: list[tuple[Handle, Connection]] = []
        try:
            for number in range(count):
                self.members.append(start(number))
        except BaseException:
            self.end()
            raise

    def call(self, message: bytes, *, timeout_s: float) -> list[Answer]:
        """The answers of all workers to a message, in order. Some may be SILENT if one is not DONE."""
        for _, pipe in self.members:
            with contextlib.suppress(OSError):  # a dead worker: `_receive` reports it
                pipe.send_bytes(message)
        waiting = {pipe: number for number, (_, pipe) in enumerate(self.members)}
        answers = {number: Answer(number, Outcome.SILENT, None) for number in waiting.values()}
        deadline = time.monotonic() + timeout_s
        while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                number = waiting.pop(pipe)
                answers[number] = self._receive(number, pipe)
                if answers[number].outcome is not Outcome.DONE:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return list(answers.values())

    def _receive(self, number: int, pipe: Connection) -> Answer:
        try:
            return Answer(number, *pickle.loads(pipe.recv_bytes()))
        except (EOFError, OSError):
            code = self.members[number][0].wait()
            is_lost = code == -signal.SIGABRT  # how C++ reacts to a lost peer
            return Answer(number, Outcome.LOST if is_lost else Outcome.DIED, code)

    def describe(self, answers: Sequence[Answer], *, timeout_s: float) -> str:
        """A sentence about the worker to blame; '' if all are done."""
        blamed = blamed_of(answers)
        if not blamed:
            return ""
        if blamed.outcome is Outcome.SILENT:
            silent = [answer.worker for answer in answers if answer.outcome is Outcome.SILENT]
            names = ", ".join(map(str, silent))
            return f"no answer within {timeout_s:g} s from {self.noun}{'s' * (len(silent) > 1)} {names}"
        name = f"{self.noun} {blamed.worker} of {len(answers)}"
        if isinstance(blamed.value, Failure):
            return f"{name} failed: {blamed.value.text.splitlines()[-1]}\n{blamed.value.text}"
        return f"{name}: {blamed.value if isinstance(blamed.value, str) else describe_exit(blamed.value)}"

    def end(self, *, grace_s: float = 0.0) -> None:
        """End all workers: ask them to leave, and kill those that have not left after a time."""
        leaving = []
        for _, pipe in self.members:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"")
                leaving.append(pipe)
        deadline = time.monotonic() + grace_s
        while leaving and (ready := wait(leaving, timeout=max(0.0, deadline - time.monotonic()))):
            for pipe in ready:  # a late answer, or the end
                assert isinstance(pipe, Connection)
                try:
                    pipe.recv_bytes()
                except (EOFError, OSError):
                    leaving.remove(pipe)
        for process, _ in self.members:
            process.kill()
        for process, pipe in self.members:
            process.wait()
            pipe.close()
        self.members.clear()


def blamed_of(answers: Sequence[Answer]) -> Answer | None:
    """The answer of the worker to blame; None if all are done."""
    failed = [answer for answer in answers if answer.outcome is not Outcome.DONE]
    return min(failed, key=lambda answer: (answer.outcome, answer.worker), default=None)


def raise_blamed(workers: Workers, answers: Sequence[Answer], *, timeout_s: float) -> None:
    """Raise the error of the worker to blame, with its traceback as the cause.

    Raises WorkerError: the worker died, hangs, or its error cannot be sent.
    """
    text, blamed = workers.describe(answers, timeout_s=timeout_s), blamed_of(answers)
    if blamed and isinstance(blamed.value, Failure) and blamed.value.error:
        raise pickle.loads(blamed.value.error) from WorkerError(text)
    if blamed:
        raise WorkerError(text)


def answer_calls(
    pipe: Connection, do: Callable[[bytes], Any], is_lost: Callable[[BaseException], bool]
) -> bool:
    """Answer each message of the parent with `do(message)`, until it hangs up. Returns whether all are done.

    `is_lost(error)` is True if an error only reports that another worker is gone.
    """
    all_done = True
    for message in messages(pipe):
        try:
            data = pickle.dumps((Outcome.DONE, do(message)))
        except BaseException as error:
            all_done = False
            data = pickle.dumps((Outcome.LOST if is_lost(error) else Outcome.FAILED, failure_of(error)))
        pipe.send_bytes(data)
    return all_done


def messages(pipe: Connection) -> Iterator[bytes]:
    """The messages of the parent, until it sends an empty one or hangs up."""
    with contextlib.suppress(EOFError, OSError):
        while message := pipe.recv_bytes():
            yield message


def failure_of(error: BaseException) -> Failure:
    """An error as it can be sent."""
    text = "".join(traceback.format_exception(error))
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return Failure(b"", text)
    return Failure(data, text)


def end_with_parent(parent: int) -> None:
    """End this process with its parent, even after SIGKILL. On Linux the kernel also ends a stopped process.

    `parent` is the number of the process that started this one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before
            os._exit(1)
        return

    def watch() -> NoReturn:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
