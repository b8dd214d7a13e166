"""`python -m jaxpar RUN_DIR`: read RUN_DIR/request.json, train, leave a record in RUN_DIR; under srun or
torchrun, or with --coordinator, as one of several processes, each with a part of the devices.
`--collectives RUN_DIR` times collectives instead (`compare.contract.collective_bench`). Or a question, which
`questions` answers: `--doctor`, `--ceiling`, `--compile`, `--sample`, `--convert`.

Exit codes: 0 done; 1 the run failed; 2 a bad request or experiment, or RUN_DIR is in use; 3 this machine
lacks what it needs; 4 it was asked to end early, and saved its state; 143 SIGTERM. Other than 0,
RUN_DIR/error.json says why, unless another run is in RUN_DIR.
"""

import argparse
import os
import signal
import sys
import traceback
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import msgspec

from compare.contract.collective_bench import TYPE, read_collective_request
from compare.contract.ending import (
    BAD_REQUEST,
    DONE,
    FAILED,
    MISSING,
    STOPPED,
    DivergedError,
    StoppedEarly,
    StopRequest,
)
from compare.contract.faults import IGNORED
from compare.contract.other_hosts import Waiting, blame_for_hang
from compare.contract.processes import Process, add_flags, find_process
from compare.contract.record import Failure, Recorder, clear_record, leave_failure
from compare.contract.request import read_request
from compare.contract.run_lock import lock_folder
from compare.host.disk import no_room
from compare.host.facts import MissingDevicesError, MissingPackageError
from compare.host.signals import describe_exit, is_ignored, on_signals
from compare.spec.engines.registry import JAX
from compare.spec.experiment import ExperimentError
from jaxpar.watchdog import Watchdog, exit_with_stdin

EXIT_CODES: dict[type[Exception], int] = {
    StoppedEarly: STOPPED,
    DivergedError: FAILED,
    ExperimentError: BAD_REQUEST,
    MissingDevicesError: MISSING,
    ImportError: MISSING,
}
"""Of errors whose message says all; the name of any other is said, too."""
QUESTIONS = ("doctor", "ceiling", "compile", "convert", "sample")


def main() -> int:
    """Run, and return the exit code. Every failure ends as one line, and in RUN_DIR/error.json.

    Of several processes the first holds the folder, and the first that fails leaves the word.
    """
    # Python runs its own Ctrl-C handler only when XLA's C++ returns, which a compilation does not do soon.
    if not is_ignored(signal.SIGINT):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    arguments = _parse_arguments()
    if arguments.exit_with_stdin:
        exit_with_stdin()
    try:
        if any(getattr(arguments, question) for question in QUESTIONS):
            from jaxpar.questions import answer

            answer(arguments)
            return DONE
        process, folder = find_process(arguments, os.environ), arguments.run_dir
        with lock_folder(folder) if process is None or process.is_first else nullcontext():
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
    except (ExperimentError, MissingDevicesError, MissingPackageError) as error:
        print(f"jaxpar: {error}", file=sys.stderr)
        return BAD_REQUEST if isinstance(error, ExperimentError) else MISSING


def train(folder: Path, process: Process | None = None) -> None:
    """Train what folder/request.json asks for, alone or as one of several processes."""
    request = read_request(folder)
    if request.experiment.checkpoint.every:
        StopRequest.listen()
    watchdog = _begin(folder, request.timeout_s, process)
    # JAX's parts are imported after configuring: a backend, once started, keeps its devices and platform.
    from jaxpar.configuration import configure_jax

    configure_jax(request, process)
    if process:
        from jaxpar.comm.hosts import agree_with_others

        agree_with_others(process, folder, reads=request.experiment)
    if request.engine == "plain-jit":
        from jaxpar.peers.plain_jit import train as train_engine
    else:
        from jaxpar.train import train as train_engine
    planted = nullcontext()
    if request.fault and request.fault not in IGNORED:  # a run without one does not import them
        from jaxpar.faults import plant

        planted = plant(request.fault, engine=request.engine)
    recorder = Recorder(folder) if process is None or process.is_first else None
    with planted:
        train_engine(request, recorder, folder=folder, progress=watchdog.progress)


def time_collectives(folder: Path, process: Process | None = None) -> None:
    """Time the collectives that folder/request.json asks for, alone or as one of several processes."""
    request = read_collective_request(folder, side=JAX.name)
    watchdog = _begin(folder, request.timeout_s, process)
    from jaxpar.configuration import configure_products, join_devices

    configure_products(request.platform, TYPE.name)
    join_devices(request.platform, request.ranks, process, timeout_s=request.timeout_s)
    from jaxpar.comm.hosts import agree_with_others
    from jaxpar.measure.bench import run_bench

    if process:
        agree_with_others(process, folder)
    run_bench(request, folder, progress=watchdog.progress)


def _begin(folder: Path, timeout_s: float, process: Process | None) -> Watchdog:
    """An empty record, and what ends a run that hangs: of several processes it says who does not answer."""
    if process is None or process.is_first:
        clear_record(folder)

    def on_hang(message: str, stack: str) -> None:
        if process is None:
            _report(Failure(message=message, traceback=stack), folder, process)
            return
        print(f"jaxpar: {process.name}: {message}\n{stack}", file=sys.stderr, flush=True)
        waiting = Waiting(number=process.number, where="a step")
        leave_failure(folder, blame_for_hang(folder, waiting, count=process.count, timeout_s=timeout_s))

    return Watchdog(timeout_s, on_hang)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jaxpar", description="Train one experiment with JAX.")
    parser.add_argument("run_dir", nargs="?", type=Path, help="folder with request.json")
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when standard input ends")
    parser.add_argument("--collectives", action="store_true", help="time collectives, not a training")
    parser.add_argument("--doctor", action="store_true", help="print versions and devices as JSON")
    convert = "a checkpoint to one of orbax, or one of orbax to a checkpoint"
    parser.add_argument("--convert", nargs=2, type=Path, metavar=("FROM", "TO"), help=convert)
    for question, answer in (
        ("sample", "token ids drawn from a checkpoint"),
        ("ceiling", "how fast matrices are multiplied"),
        ("compile", "a step of absent devices"),
    ):
        parser.add_argument(f"--{question}", metavar="JSON", help=f"print {answer}, as JSON")
    add_flags(parser)
    arguments = parser.parse_args()
    if arguments.run_dir is None and not any(getattr(arguments, question) for question in QUESTIONS):
        parser.error("RUN_DIR is missing")
    return arguments


def _leave(folder: Path, process: Process | None, signal_number: int) -> None:
    code = 128 + signal_number
    _report(Failure(message=describe_exit(code), is_consequence=True), folder, process)
    os._exit(code)


def failure_of(error: Exception, folder: Path, process: Process | None) -> Failure:
    """An error in error.json's words, with the exit code that follows from it."""
    code = next((code for of, code in EXIT_CODES.items() if isinstance(error, of)), None)
    full = no_room(error, folder)
    message = full or " ".join(str(error).split()) or type(error).__name__
    # A run's early end happened in training, and not in a line of code.
    stack = "" if isinstance(error, StoppedEarly | DivergedError) else traceback.format_exc()
    is_consequence = False
    if isinstance(error, StoppedEarly):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher ends the others with the first that leaves
    if code is None and not full:
        message = f"{type(error).__name__}: {message}"
        traceback.print_exception(error)
        if process:
            from jaxpar.comm.hosts import is_consequence as is_lost

            is_consequence = is_lost(error)
    code = FAILED if code is None else code
    return Failure(message=message, traceback=stack, is_consequence=is_consequence, exit_code=code)


def _report(failure: Failure, folder: Path, process: Process | None) -> None:
    """Say on standard error and in error.json what went wrong; of several processes, the first cause."""
    if process:
        message = f"{process.name}: {failure.message}"
        failure = msgspec.structs.replace(failure, message=message, rank=process.number)
    print(f"jaxpar: {failure.message}", file=sys.stderr, flush=True)
    try:
        leave_failure(folder, failure)
    except OSError as error:
        if str(error) not in failure.message:  # a full disk has been named already
            print(f"jaxpar: {folder}: cannot leave error.json: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
