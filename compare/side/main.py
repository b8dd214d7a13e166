"""`python -m SIDE`: the command line of both sides.

    python -m SIDE RUN_DIR                  run RUN_DIR/request.json, and write the record there
    python -m SIDE --collectives RUN_DIR    time collectives instead (`compare.side.collective_bench`)
    python -m SIDE --QUESTION               print the answer as a line of JSON

Exit codes: 0 done; 1 the run failed; 2 the request is invalid or RUN_DIR is in use; 3 this machine lacks
devices or packages; 4 the run was asked to stop and saved its state; 128 + n signal n. RUN_DIR/error.json has
the cause of a failure, unless another run uses RUN_DIR. A SIGINT that is ignored at the start, as in a
script's background job, stays ignored.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from compare.contract.record import clear_record, cut_record, leave_failure
from compare.contract.request import Request, read_request, read_request_file
from compare.side.collective_bench import CollectiveRequest
from compare.side.ending import DONE, RunFailed, StopRequest, explained_failure
from compare.side.process_states import State, announce, write_state
from compare.side.processes import Process, find_process
from compare.side.run_lock import lock_folder
from compare.system.signals import is_ignored, when_stdin_ends

STDIN_GRACE_S = 5.0
QUESTIONS = ("doctor", "convert", "sample", "compile")


class Side(NamedTuple):
    """The differences between the two sides."""

    name: str
    run: Callable[[Request | CollectiveRequest, Path, Process | None], None]
    """Do a request in a folder; without a place among several processes, as the whole run."""
    answer: Callable[[argparse.Namespace], object]
    """The answer to `arguments.question`; None for a conversion, which writes files."""


def main(side: Side) -> int:
    """Run a request or answer a question. Returns the exit code."""
    if not is_ignored(signal.SIGINT):  # Python's own handler waits until C++ returns
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    arguments = parse_arguments(side.name)
    if arguments.exit_with_stdin:
        when_stdin_ends(_end_by_sigterm)
    try:
        if arguments.question:
            print(msgspec.json.encode(side.answer(arguments)).decode(), flush=True)
        else:
            run(side, arguments.run_dir, collectives=arguments.collectives)
        return DONE
    except Exception as error:
        if not (failure := explained_failure(error, arguments.run_dir)):
            raise
        print(f"{side.name}: {failure.message}\n{failure.traceback}", end="", file=sys.stderr, flush=True)
        return failure.exit_code


def run(side: Side, folder: Path, *, collectives: bool) -> None:
    """Do folder/request.json. The first process locks the folder, for all. Raises an error with its cause."""
    process = find_process(os.environ)
    is_first = process is None or process.is_first
    with lock_folder(folder) if is_first else nullcontext():
        try:
            if process:
                announce(folder, process)
            if collectives:
                request = read_request_file(folder, CollectiveRequest)
            else:
                request = read_request(folder, side.name)
                if request.experiment.checkpoint.every:
                    StopRequest.listen()
            if is_first and isinstance(request, Request) and request.continues:
                cut_record(folder, request.next_step)
            elif is_first:
                clear_record(folder)
            side.run(request, folder, process)
        except Exception as error:
            if not (failure := explained_failure(error, folder)):
                raise
            if process:
                message = f"{process.name}: {failure.message}"
                failure = replace(failure, message=message, rank=process.number)
                write_state(folder, State(number=process.number, failure=failure))
            if is_first:
                leave_failure(folder, failure)
            raise RunFailed(failure) from None


def parse_arguments(side: str) -> argparse.Namespace:
    """Parse a side's command line; `question` is the name of a question, or ''."""
    parser = argparse.ArgumentParser(prog=f"python -m {side}", description="Run one engine.")
    parser.add_argument("run_dir", nargs="?", type=Path, help="folder with request.json, for the record")
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when standard input ends")
    parser.add_argument("--collectives", action="store_true", help="time collectives, not a training")
    parser.add_argument("--doctor", action="store_true", help="print versions and devices, as JSON")
    parser.add_argument(
        "--convert", nargs=2, type=Path, metavar=("FROM", "TO"), help="convert a checkpoint to another form"
    )
    parser.add_argument("--base", default="", metavar="JSON", help="the experiment, if FROM has none")
    parser.add_argument("--sample", metavar="JSON", help="print token ids drawn from a checkpoint, as JSON")
    parser.add_argument("--compile", metavar="JSON", help="print what XLA makes of a step, as JSON")
    found = parser.parse_args()
    found.question = next((question for question in QUESTIONS if getattr(found, question)), "")
    if found.run_dir is None and not found.question:
        parser.error("RUN_DIR is missing")
    return found


def _end_by_sigterm() -> None:
    """End this process by SIGTERM, or by os._exit if the main thread does not return from C."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STDIN_GRACE_S)
    os._exit(128 + signal.SIGTERM)
