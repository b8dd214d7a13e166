"""`python -m jaxpar RUN_DIR`: read RUN_DIR/request.json, train, leave a record in RUN_DIR; under srun or
torchrun, or with --coordinator, as one of several processes, each with a part of the devices.
`--collectives RUN_DIR` times collectives instead (`compare.contract.collective_bench`). Or a question:
`--doctor`, `--ceiling JSON` (`compare.contract.ceiling`), `--compile JSON` (`.ahead_of_time`),
`--sample JSON` (`compare.numerics.sampling`), `--convert FROM TO`.

Exit codes: 0 done; 1 the run failed; 2 a bad request or experiment, or RUN_DIR is in use; 3 this machine
lacks what it needs; 4 it was asked to end early, and saved its state; 143 SIGTERM. Other than 0,
RUN_DIR/error.json says why, unless another run is in RUN_DIR.
"""

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from compare.contract.collective_bench import TYPE, clear_rows, read_collective_request
from compare.contract.divergence import DivergedError
from compare.contract.early_stop import StoppedEarly, StopRequest
from compare.contract.exit_codes import BAD_REQUEST, DONE, FAILED, MISSING, STOPPED
from compare.contract.other_hosts import Waiting, blame_for_hang
from compare.contract.processes import Process, add_flags, find_process, require_port
from compare.contract.record import Failure, Recorder, clear_record, leave_failure, write_failure
from compare.contract.request import Request, read_request
from compare.contract.run_lock import lock_folder
from compare.host.disk import no_room
from compare.host.exits import describe_exit
from compare.host.facts import MissingDevicesError, MissingPackageError
from compare.host.signals import is_ignored, on_signals
from compare.spec.engines.registry import JAX
from compare.spec.experiment import ExperimentError
from jaxpar.watchdog import Watchdog, exit_with_stdin


def main() -> int:
    """Run, and return the exit code."""
    # Python runs its own Ctrl-C handler only when XLA's C++ returns, which a compilation does not do soon.
    if not is_ignored(signal.SIGINT):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    arguments = _parse_arguments()
    if arguments.exit_with_stdin:
        exit_with_stdin()
    if _is_question(arguments):
        return _answer(arguments)
    try:
        process = find_process(arguments, os.environ)
    except ExperimentError as error:
        print(f"jaxpar: {error}", file=sys.stderr)
        return BAD_REQUEST
    work = time_collectives if arguments.collectives else train
    return run(arguments.run_dir, partial(work, process=process), process=process)


def run(folder: Path, work: Callable[[Path], None], *, process: Process | None = None) -> int:
    """Do what folder/request.json asks for; every failure ends as one line and a code.

    It leaves error.json too, but not in a folder in which another run is at work. Of several processes the
    first holds the folder, and the first that fails leaves the word.
    """
    try:
        with lock_folder(folder) if process is None or process.is_first else nullcontext():
            code = _attempt(folder, work, process)
            if process and code != DONE:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)  # JAX's own end would wait for the other processes
            return code
    except ExperimentError as error:
        print(f"jaxpar: {error}", file=sys.stderr)
        return BAD_REQUEST


def _attempt(folder: Path, work: Callable[[Path], None], process: Process | None) -> int:
    on_signals([signal.SIGTERM], partial(_leave, folder, process))
    try:
        work(folder)
    except StoppedEarly as stopped:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher ends the others with the first that leaves
        return _fail(folder, stopped, STOPPED, process)
    except ExperimentError as error:
        return _fail(folder, error, BAD_REQUEST, process)
    except (MissingDevicesError, ImportError) as error:
        return _fail(folder, error, MISSING, process)
    except Exception as error:
        return _fail(folder, error, FAILED, process)
    return DONE


def train(folder: Path, process: Process | None = None) -> None:
    """Train what folder/request.json asks for, alone or as one of several processes."""
    request = read_request(folder)
    if process:
        require_port(process)
    if request.experiment.checkpoint.every:
        StopRequest.listen()
    is_first = process is None or process.is_first
    if is_first:
        clear_record(folder)
    watchdog = _watchdog(folder, request.timeout_s, process)
    from jaxpar.configuration import configure_jax

    configure_jax(request, process)
    if process:
        from jaxpar.comm.hosts import agree_with_others
        from jaxpar.measure.usage import PACKAGES

        agree_with_others(process, folder, PACKAGES, reads=request.experiment)
    # Imported after configuring: a backend, once started, keeps its devices and platform.
    from jaxpar.peers import load_train

    train_engine = load_train(request.engine)
    with _planted(request):
        if is_first:
            train_engine(request, Recorder(folder), progress=watchdog.progress)
        else:
            train_engine(request, None, folder=folder, progress=watchdog.progress)


def time_collectives(folder: Path, process: Process | None = None) -> None:
    """Time the collectives that folder/request.json asks for, alone or as one of several processes."""
    request = read_collective_request(folder, side=JAX.name)
    if process:
        require_port(process)
    if process is None or process.is_first:
        clear_record(folder)
        clear_rows(folder)
    watchdog = _watchdog(folder, request.timeout_s, process)
    from jaxpar.configuration import configure_products, join_devices

    configure_products(request.platform, TYPE.name)
    join_devices(request.platform, request.ranks, process, timeout_s=request.timeout_s)
    if process:
        from jaxpar.comm.hosts import agree_with_others
        from jaxpar.measure.usage import PACKAGES

        agree_with_others(process, folder, PACKAGES)
    from jaxpar.measure.collective_bench import run_bench

    run_bench(request, folder, progress=watchdog.progress)


def _watchdog(folder: Path, timeout_s: float, process: Process | None) -> Watchdog:
    """Ends a run that hangs, with a word of why: of several processes, who does not answer."""
    report = partial(_report_hang, folder, process, timeout_s) if process else partial(_report, folder)
    return Watchdog(timeout_s, report)


def _planted(request: Request) -> AbstractContextManager:
    """The mistake that the request asks for; a run without one does not import them."""
    if not request.fault:
        return nullcontext()
    from jaxpar.faults import plant

    return plant(request.fault, engine=request.engine, layout=request.experiment.layout)


def _is_question(arguments: argparse.Namespace) -> bool:
    """Whether something else than a training is asked for."""
    words = (arguments.doctor, arguments.ceiling, arguments.compile, arguments.convert, arguments.sample)
    return any(words)


def _answer(arguments: argparse.Namespace) -> int:
    """Answer on standard output, or say on standard error why not. Returns the exit code."""
    try:
        from jaxpar import questions

        if arguments.doctor:
            questions.doctor()
        elif arguments.ceiling:
            questions.ceiling(arguments.ceiling)
        elif arguments.compile:
            questions.compile_ahead(arguments.compile)
        elif arguments.convert:
            questions.convert(*arguments.convert)
        else:
            questions.draw_sample(arguments.sample)
    except (ExperimentError, MissingDevicesError, MissingPackageError) as error:
        print(f"jaxpar: {error}", file=sys.stderr)
        return BAD_REQUEST if isinstance(error, ExperimentError) else MISSING
    return DONE


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jaxpar", description="Train one experiment with JAX.")
    parser.add_argument("run_dir", nargs="?", type=Path, help="folder with request.json")
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when standard input ends")
    parser.add_argument("--collectives", action="store_true", help="time collectives, not a training")
    parser.add_argument("--doctor", action="store_true", help="print versions and devices as JSON")
    parser.add_argument(
        "--convert",
        nargs=2,
        type=Path,
        metavar=("FROM", "TO"),
        help="a checkpoint to one of orbax, or one of orbax to a checkpoint",
    )
    parser.add_argument("--sample", metavar="JSON", help="print token ids drawn from a checkpoint, as JSON")
    parser.add_argument("--ceiling", metavar="JSON", help="print how fast matrices are multiplied, as JSON")
    parser.add_argument("--compile", metavar="JSON", help="print a step of absent devices, as JSON")
    add_flags(parser)
    arguments = parser.parse_args()
    if not _is_question(arguments) and arguments.run_dir is None:
        parser.error("RUN_DIR is missing")
    return arguments


def _leave(folder: Path, process: Process | None, signal_number: int) -> None:
    code = 128 + signal_number
    _report(folder, describe_exit(code), "", process=process, is_consequence=True)
    os._exit(code)


def _fail(folder: Path, error: Exception, code: int, process: Process | None) -> int:
    full = no_room(error, folder)
    message = full or " ".join(str(error).split()) or type(error).__name__
    if isinstance(
        error, DivergedError | StoppedEarly
    ):  # it has happened in training, and not in a line of code
        _report(folder, message, "", process=process, code=code)
        return code
    if code == FAILED and not full:
        message = f"{type(error).__name__}: {message}"
        traceback.print_exception(error)
    lost = process is not None and code == FAILED and not full and _tells_of_lost_peer(error)
    _report(folder, message, traceback.format_exc(), process=process, is_consequence=lost, code=code)
    return code


def _tells_of_lost_peer(error: Exception) -> bool:
    from jaxpar.comm.hosts import is_consequence

    return is_consequence(error)


def _report(
    folder: Path,
    message: str,
    stack: str,
    *,
    process: Process | None = None,
    is_consequence: bool = False,
    code: int = FAILED,
) -> None:
    """Say on standard error and in error.json what went wrong; of several processes, the first cause."""
    message = f"{process.name}: {message}" if process else message
    print(f"jaxpar: {message}", file=sys.stderr, flush=True)
    number = process.number if process else -1
    failure = Failure(
        message=message, traceback=stack, rank=number, is_consequence=is_consequence, exit_code=code
    )
    try:
        (leave_failure if process else write_failure)(folder, failure)
    except OSError as error:
        if str(error) not in message:  # a full disk has been named already
            print(f"jaxpar: {folder}: cannot leave error.json: {error}", file=sys.stderr, flush=True)


def _report_hang(folder: Path, process: Process, timeout_s: float, message: str, stack: str) -> None:
    """Say who does not answer: of several processes all hang with one."""
    print(f"jaxpar: {process.name}: {message}\n{stack}", file=sys.stderr, flush=True)
    own = Waiting(number=process.number, where="a step")
    leave_failure(folder, blame_for_hang(folder, own, count=process.count, timeout_s=timeout_s))


if __name__ == "__main__":
    sys.exit(main())
