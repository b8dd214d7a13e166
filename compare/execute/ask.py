"""A question to a side, in a fresh process: `python -m SIDE --WORD` prints its answer as one line of JSON."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping
from typing import TypeVar

import msgspec

T = TypeVar("T")
TIMEOUT_S = 120
OUTPUT_BYTES = 1_000_000
LINE_LENGTH = 300


def ask(
    side: str,
    python: str,
    question: list[str],
    *,
    answer: type[T],
    environment: Mapping[str, str],
    timeout_s: float = 0.0,
) -> T | str:
    """Ask one side something; one line of why not if it cannot answer.

    Args:
        side: a name in SIDES.
        python: that runs it: any program, as far as we know.
        question: arguments of `python -m SIDE`.
        answer: what it prints.
        environment: of the process.
        timeout_s: seconds until it must have answered; 0 for `TIMEOUT_S`.
    """
    if not shutil.which(python):
        return f"{side}: {python}: no such program"
    try:
        returncode, output = output_of([python, "-m", side, *question], environment, timeout_s or TIMEOUT_S)
    except OSError as error:
        return f"{side}: {python}: {error.strerror}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if returncode:
        return f"{side}: {_shortened(lines[-1]) if lines else f'{python} ended with exit code {returncode}'}"
    for line in reversed(lines):  # a warning may come after it
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(line, type=answer)
    said = f"it says {_shortened(lines[-1])}" if lines else "it says nothing"
    return f"{side}: {python} is no Python that has {side}: {said}"


def output_of(command: list[str], environment: Mapping[str, str], timeout_s: float) -> tuple[int, str]:
    """Exit code and output, errors among it, of a command that may be any program: its time and its words
    are limited."""
    process = subprocess.Popen(
        command,
        start_new_session=True,  # whatever it starts ends with it
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
    )
    assert process.stdout
    timer = threading.Timer(timeout_s, _kill, [process])
    timer.start()
    try:
        output = process.stdout.read(OUTPUT_BYTES)
        process.stdout.close()  # one that would say more ends here
        process.wait()
    finally:
        timed_out = not timer.is_alive()
        timer.cancel()
        _kill(process)
        process.wait()
    if timed_out:
        raise OSError(errno.ETIMEDOUT, f"no answer for {timeout_s:g} s")
    return process.returncode, output.decode(errors="replace")


def _kill(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _shortened(line: str) -> str:
    return line if len(line) <= LINE_LENGTH else line[:LINE_LENGTH] + " ..."
