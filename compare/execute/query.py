"""Ask a side a question in a new process: `python -m SIDE --QUESTION` prints a line of JSON."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from compare.execute.launch import EnvironmentMissing, child_environment
from compare.side.ending import BAD_REQUEST
from compare.spec.engines.registry import SIDES
from compare.spec.experiment import Experiment, ExperimentError
from compare.system.disk import NO_ROOM

T = TypeVar("T")
TIMEOUT_S = 120
CONVERSION_S = 24 * 3600.0
LINE_LENGTH = 500


def query(
    side: str,
    python: str,
    question: list[str],
    *,
    answer: type[T],
    platform: str = "cpu",
    timeout_s: float = 0.0,
) -> T:
    """Run `python -m SIDE QUESTION` and decode its answer, the last line that is JSON of the type `answer`.

    `platform` is cpu, gpu, or '' for all devices of this machine; `timeout_s` of 0 is TIMEOUT_S. Raises
    ExperimentError: the side rejects the question; OSError: a disk is full; EnvironmentMissing: the Python
    gives no answer.
    """
    if not shutil.which(python):
        raise EnvironmentMissing(f"{side}: {python}: no such program")
    command = [python, "-m", side, *question, "--exit-with-stdin"]
    environment = child_environment(SIDES[side], platform)
    try:
        returncode, output = output_of(command, environment, timeout_s or TIMEOUT_S)
    except OSError as error:
        raise EnvironmentMissing(f"{side}: {python}: {error.strerror}") from None
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = lines[-1][:LINE_LENGTH].removeprefix(f"{side}: ") if lines else ""
    if returncode == BAD_REQUEST and last:
        raise ExperimentError(last)
    for code in NO_ROOM if returncode else ():  # orbax raises other errors, and names the cause in its text
        if os.strerror(code) in output:
            raise OSError(code, os.strerror(code))
    if returncode:
        raise EnvironmentMissing(f"{side}: {last or f'{python} ended with exit code {returncode}'}")
    for line in reversed(lines):  # a warning may follow the answer
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(line, type=answer)
    raise EnvironmentMissing(
        f"{side}: {python} printed {last or 'nothing'}: give a Python in which {side} is installed"
    )


def output_of(command: list[str], environment: Mapping[str, str], timeout_s: float) -> tuple[int, str]:
    """The exit code and the output, with errors, of any program. Raises OSError.

    Its standard input is a pipe that closes when this process ends, however it ends.
    """
    stdin, ours = os.pipe()
    with open(stdin, "rb") as stdin, open(ours, "wb"):
        process = subprocess.Popen(
            command,
            start_new_session=True,  # so that the processes it starts end with it
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise OSError(errno.ETIMEDOUT, f"no answer for {timeout_s:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, output.decode(errors="replace")


def convert_by_side(
    source: Path, target: Path, foreign: str, *, pythons: Mapping[str, str], base: Experiment | None = None
) -> None:
    """Convert a checkpoint from or to a format of a side (`Side.converts`); `base` is its experiment, if it
    has none.

    Raises ExperimentError: the source cannot be read safely, or does not fit; also as `query`.
    """
    side = next(side for side in SIDES.values() if foreign in side.converts)
    question = ["--convert", str(source.absolute()), str(target.absolute())]
    if base:
        question += ["--base", msgspec.json.encode(base).decode()]
    python = pythons.get(side.name, sys.executable)
    query(side.name, python, question, answer=type(None), timeout_s=CONVERSION_S)
