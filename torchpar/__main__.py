"""`python -m torchpar RUN_DIR [--exit-with-stdin]`, or one of `--doctor`, `--ceiling JSON` (see
`compare.contract.ceiling`), `--convert CKPT.pt OUT.safetensors [--model JSON]` (nanoGPT's weights),
`--collectives RUN_DIR` (`compare.contract.collective_bench`).

Exit codes: 0 done; 1 the run failed; 2 a bad request, or RUN_DIR is in use; 3 the machine lacks something;
128 + n signal n. Other than 0, RUN_DIR/error.json says why, unless another run is in RUN_DIR.

Under srun or torchrun, or with --coordinator, this process is one rank; else it is the parent of all ranks.
A SIGINT that it was started to ignore, as a script's background jobs are, stays ignored.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import msgspec

from compare.contract.collective_bench import read_collective_request
from compare.contract.ending import BAD_REQUEST, DONE, FAILED, MISSING, STOPPED, StoppedEarly
from compare.contract.processes import Process, add_flags, find_process
from compare.contract.record import Failure, clear_record, leave_failure
from compare.contract.run_lock import lock_folder
from compare.host.disk import no_room
from compare.host.facts import MissingDevicesError, MissingPackageError
from compare.host.signals import describe_exit, is_ignored
from compare.spec.engines.registry import TORCH
from compare.spec.experiment import ExperimentError

STDIN_GRACE_S = 5.0
ASKED_IN_JSON = {
    "ceiling": "how fast matrices are multiplied",
    "alone": "what one rank of many sends",
    "sample": "token ids drawn from a checkpoint",
}
QUESTIONS = ("doctor", "convert", *ASKED_IN_JSON)


def main() -> int:
    """Parse the command line, and run or answer. Returns the exit code."""
    arguments = _parse_arguments()
    for number in (signal.SIGINT, signal.SIGTERM):  # while PyTorch is imported there are no ranks to end
        if not is_ignored(number):
            signal.signal(number, lambda number, frame: os._exit(128 + number))
    if arguments.exit_with_stdin:
        threading.Thread(target=_exit_with_stdin, daemon=True).start()
    try:
        if any(getattr(arguments, question) for question in QUESTIONS):
            if (said := answer(arguments)) is not None:
                print(msgspec.json.encode(said).decode(), flush=True)
            return DONE
        return run(arguments.run_dir, arguments)
    except (ExperimentError, MissingDevicesError, msgspec.MsgspecError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return MISSING if isinstance(error, MissingDevicesError) else BAD_REQUEST


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m torchpar", description="Run one engine of torchpar.")
    parser.add_argument("run_dir", nargs="?", type=Path, help="holds request.json; the record goes there")
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when standard input ends")
    parser.add_argument("--collectives", action="store_true", help="time collectives, not a training")
    parser.add_argument("--doctor", action="store_true", help="say as JSON what this environment offers")
    for question, subject in ASKED_IN_JSON.items():
        parser.add_argument(f"--{question}", default="", metavar="JSON", help=f"print {subject}, as JSON")
    parser.add_argument(
        "--convert",
        nargs=2,
        type=Path,
        metavar=("FROM", "TO"),
        help="nanoGPT's ckpt.pt to weights (TO ends in .safetensors) or to a checkpoint; or one to a ckpt.pt",
    )
    parser.add_argument("--model", default="", metavar="JSON", help="the model's sizes, for weights")
    parser.add_argument("--experiment", default="", metavar="JSON", help="what ckpt.pt does not say")
    add_flags(parser)
    arguments = parser.parse_args()
    if arguments.run_dir is None and not any(getattr(arguments, question) for question in QUESTIONS):
        parser.error("RUN_DIR is missing")
    return arguments


def answer(arguments: argparse.Namespace) -> object:
    """The answer to a question, to be printed as JSON; None of a conversion, which leaves files."""
    if arguments.doctor:
        import torch

        from compare.host.facts import versions
        from torchpar.comm.mesh import PACKAGES, device_kind

        gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        return {
            "versions": versions(PACKAGES),
            "cpu_devices": f"any number of gloo ranks, one thread each, on {os.cpu_count() or 1} cores",
            "gpus": [device_kind(torch.device("cuda", index)) for index in gpus],
        }
    if arguments.ceiling:
        from compare.contract.ceiling import read_ceiling_request
        from torchpar.measure.ceiling import measure

        return measure(read_ceiling_request(arguments.ceiling))
    if arguments.alone:
        from compare.contract.absent import read_absent_request
        from torchpar.alone import run_alone

        return run_alone(read_absent_request("--alone", arguments.alone))
    if arguments.sample:
        from compare.numerics.sampling import read_sample_request
        from torchpar.sample import sample

        return sample(read_sample_request(arguments.sample))
    from compare.spec.experiment import Experiment, Model
    from torchpar.convert import convert
    from torchpar.nanogpt_checkpoint import export_checkpoint, import_checkpoint

    source, target = arguments.convert
    if source.is_dir():
        export_checkpoint(source, target)
    elif target.suffix == ".safetensors":
        sizes = msgspec.json.decode(arguments.model, type=Model) if arguments.model else None
        convert(source, target, sizes)
    else:
        base = msgspec.json.decode(arguments.experiment or "{}", type=Experiment)
        import_checkpoint(source, target, base)
    return None


def run(folder: Path, arguments: argparse.Namespace) -> int:
    """Do the request in `folder`, and leave a record or error.json there. Returns the exit code."""
    process = find_process(arguments, os.environ)
    if process and "RANK" not in os.environ:  # as torchrun says it
        os.environ.update(process.variables)
    is_first = int(os.environ.get("RANK", "0")) == 0  # the one that holds the folder, for all ranks
    with lock_folder(folder) if is_first else contextlib.nullcontext():
        try:
            if process:
                from torchpar.comm.process_groups import choose_interface

                if process.address[0]:
                    choose_interface(*process.address)
            (time_collectives if arguments.collectives else train)(folder, process)
            return DONE
        except BaseException as error:
            failure = failure_of(error, folder)
        print(failure.message, file=sys.stderr)
        print(failure.traceback, file=sys.stderr, end="")
        # Of ranks that torchrun has started, the first that fails leaves the word: see torchrun.py.
        if is_first and not ("RANK" in os.environ and failure.exit_code == FAILED):
            try:
                leave_failure(folder, failure)
            except OSError as error:
                if str(error) not in failure.message:  # a full disk has been named already
                    print(f"{folder}: cannot leave error.json: {error}", file=sys.stderr)
        return failure.exit_code


def failure_of(error: BaseException, folder: Path) -> Failure:
    """An error in error.json's words, with its exit code; raises any that is a bug."""
    from torchpar.launch import LaunchInterrupted, RanksFailed

    match error:
        case RanksFailed():
            return error.failure
        case LaunchInterrupted():
            code = 128 + error.signal_number
            return Failure(message=describe_exit(code), exit_code=code)
        case OSError():
            full = no_room(error, folder)
            return Failure(message=full or f"{folder}: {error}", exit_code=FAILED if full else BAD_REQUEST)
        case ExperimentError():
            code = BAD_REQUEST
        case MissingDevicesError() | MissingPackageError():
            code = MISSING
        case StoppedEarly():
            code = STOPPED
        case _:
            raise error
    return Failure(message=str(error), exit_code=code)


def train(folder: Path, process: Process | None = None) -> None:
    """Train what folder/request.json asks for, as all ranks or as one of a launcher's."""
    from torchpar import entry, torchrun

    request = entry.read_request(folder)
    if "RANK" not in os.environ:
        return entry.start_ranks(request, folder)
    work = partial(entry.train, request=request, folder=folder)
    saves = request.experiment.checkpoint.every > 0
    torchrun.become_rank(work, folder, request, devices=request.experiment.layout.devices, saves=saves)


def time_collectives(folder: Path, process: Process | None = None) -> None:
    """Time the collectives that folder/request.json asks for, as all ranks or as one of a launcher's."""
    from torchpar import torchrun
    from torchpar.collective_bench import time_as_rank
    from torchpar.launch import launch

    request = read_collective_request(folder, side=TORCH.name)
    work = partial(time_as_rank, request=request, folder=folder)
    if "RANK" in os.environ:
        return torchrun.become_rank(work, folder, request, devices=request.ranks)
    clear_record(folder)
    launch(work, world_size=request.ranks, platform=request.platform, timeout_s=request.timeout_s)


def _exit_with_stdin() -> None:
    """End this process and its ranks as SIGTERM does, once no process holds standard input open any more."""
    while os.read(0, 4096):  # not sys.stdin: its lock must not be held while ranks are forked
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STDIN_GRACE_S)
    os._exit(128 + signal.SIGTERM)  # the main thread is deep in C; the ranks notice that it is gone


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # under torchrun this is a rank, whose process group must stay (process_groups.py)
