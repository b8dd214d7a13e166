"""`python -m jaxpar`: as the only process of a run, or as one of several, each with a part of the devices.

It is one of several under srun or torchrun, or with their variables. See `compare.side.command`.
"""

import os
import signal
import sys
import traceback
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import msgspec

from compare.contract.record import Failure, clear_record, leave_failure
from compare.contract.request import read_request, read_request_file
from compare.side.collective_bench import TYPE, CollectiveRequest
from compare.side.command import parse_arguments, told_by
from compare.side.ending import DONE, FAILED, StoppedEarly, StopRequest
from compare.side.process_states import START, State, announce, blame_for_hang, say
from compare.side.processes import Process, find_process
from compare.side.run_lock import lock_folder
from compare.spec.experiment import one_line
from compare.system.signals import describe_exit, is_ignored, on_signals, when_stdin_ends
from jaxpar.watchdog import Watchdog

ASKED_IN_JSON = {
    "sample": "token ids drawn from a checkpoint",
    "ceiling": "how fast matrices are multiplied",
}


def main() -> int:
    """Run or answer. Returns the exit code; every failure is one line, and in RUN_DIR/error.json.

    Of several processes the first holds the folder, and the first that fails leaves the word.
    """
    # Python runs its own Ctrl-C handler only when XLA's C++ returns, which a compilation does not do soon.
    if not is_ignored(signal.SIGINT):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    arguments = parse_arguments("jaxpar", ASKED_IN_JSON)
    if arguments.exit_with_stdin:
        when_stdin_ends(partial(os._exit, FAILED))
    folder = arguments.run_dir
    try:
        if arguments.question:
            from jaxpar.questions import answer

            print(msgspec.json.encode(answer(arguments)).decode())
            return DONE
        process = find_process(os.environ)
        with lock_folder(folder) if process is None or process.is_first else nullcontext():
            if process:
                announce(folder, process)
            on_signals([signal.SIGTERM], partial(_leave, folder, process))
            try:
                (time_collectives if arguments.collectives else train)(folder, process)
                return DONE
            except Exception as error:
                failure = failure_of(error, folder, process)
                _report(failure, folder, process)
            if process:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(failure.exit_code)  # JAX's own end would wait for the other processes
            return failure.exit_code
    except Exception as error:
        if not (failure := told_by(error, folder)):
            raise
        print(f"jaxpar: {failure.message}", file=sys.stderr)
        return failure.exit_code


def train(folder: Path, process: Process | None = None) -> None:
    """Train what folder/request.json asks for, alone or as one of several processes."""
    request = read_request(folder, "jaxpar")
    if request.experiment.checkpoint.every:
        StopRequest.listen()
    watchdog = _begin(folder, request.timeout_s, process)
    # JAX's parts are imported after configuring: a backend, once started, keeps its devices and platform.
    from jaxpar.configuration import configure_jax

    configure_jax(request, process)
    if process:
        from jaxpar.comm.hosts import agree_with_others

        agree_with_others(process, reads=request.experiment)
    if request.engine == "plain-jit":
        from jaxpar.peers.plain_jit import train as train_engine
    else:
        from jaxpar.train import train as train_engine
    train_engine(request, folder, progress=watchdog.progress)


def time_collectives(folder: Path, process: Process | None = None) -> None:
    """Time the collectives that folder/request.json asks for, alone or as one of several processes."""
    request = read_request_file(folder, CollectiveRequest)
    watchdog = _begin(folder, request.timeout_s, process)
    from jaxpar.configuration import configure_products, join_devices

    configure_products(request.platform, TYPE.name)
    join_devices(request.platform, request.ranks, process, timeout_s=request.timeout_s)
    from jaxpar.comm.hosts import agree_with_others
    from jaxpar.measure.bench import run_bench

    if process:
        agree_with_others(process)
    run_bench(request, folder, progress=watchdog.progress)


def _begin(folder: Path, timeout_s: float, process: Process | None) -> Watchdog:
    """An empty record, and what ends a run that hangs: of several processes it says who does not answer."""
    if process is None or process.is_first:
        clear_record(folder)

    def state(number: int) -> State:
        where = "a step" if watchdog.in_step else START if watchdog.finished == 1 else "the record"
        return State(number=number, where=where, beats=watchdog.finished, looks=watchdog.looks)

    def on_work() -> None:
        if process:
            say(folder, state(process.number))

    def on_hang(message: str, stack: str) -> bool:
        if process is None:
            _report(Failure(message=message, traceback=stack), folder, process)
            return False
        print(f"jaxpar: {process.name}: {message}\n{stack}", file=sys.stderr, flush=True)
        failure = blame_for_hang(folder, state(process.number), count=process.count, timeout_s=timeout_s)
        if failure:
            leave_failure(folder, failure)
        return failure is None

    watchdog = Watchdog(timeout_s, on_hang, on_work)
    return watchdog


def _leave(folder: Path, process: Process | None, signal_number: int) -> None:
    code = 128 + signal_number
    _report(Failure(message=describe_exit(code), is_consequence=True, exit_code=code), folder, process)
    os._exit(code)


def failure_of(error: Exception, folder: Path, process: Process | None) -> Failure:
    """An error in error.json's words, with the exit code that follows from it; of a bug with its stack."""
    if isinstance(error, StoppedEarly):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher ends the others with the first that leaves
    if failure := told_by(error, folder):
        return failure
    is_consequence = False
    if process:
        from jaxpar.comm.hosts import is_consequence as is_lost

        is_consequence = is_lost(error)
    traceback.print_exception(error)
    message, stack = f"{type(error).__name__}: {one_line(error)}", "".join(traceback.format_exception(error))
    return Failure(message=message, traceback=stack, is_consequence=is_consequence)


def _report(failure: Failure, folder: Path, process: Process | None) -> None:
    """Say on standard error and in error.json what went wrong; of several processes, the first cause."""
    if process:
        message = f"{process.name}: {failure.message}"
        failure = msgspec.structs.replace(failure, message=message, rank=process.number)
        say(folder, State(number=process.number, where="the end", failure=failure))
    print(f"jaxpar: {failure.message}", file=sys.stderr, flush=True)
    leave_failure(folder, failure)


if __name__ == "__main__":
    sys.exit(main())
