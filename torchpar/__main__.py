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
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from compare.contract.collective_bench import read_collective_request
from compare.contract.early_stop import StoppedEarly
from compare.contract.exit_codes import BAD_REQUEST, DONE, FAILED, MISSING, STOPPED
from compare.contract.processes import Process, add_flags, find_process, require_port
from compare.contract.record import Failure, clear_record, write_failure
from compare.contract.run_lock import lock_folder
from compare.host.disk import no_room
from compare.host.facts import MissingDevicesError, MissingPackageError
from compare.host.signals import describe_exit, is_ignored
from compare.spec.engines.registry import TORCH
from compare.spec.experiment import ExperimentError

STDIN_GRACE_S = 5.0


def main() -> int:
    """Parse the command line, and run. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m torchpar", description="Run one engine of torchpar.")
    parser.add_argument("run_dir", nargs="?", type=Path, help="holds request.json; the record goes there")
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when standard input ends")
    parser.add_argument("--collectives", action="store_true", help="time collectives, not a training")
    parser.add_argument("--doctor", action="store_true", help="say as JSON what this environment offers")
    parser.add_argument("--ceiling", metavar="JSON", help="print how fast matrices are multiplied, as JSON")
    parser.add_argument("--alone", metavar="JSON", help="print what one rank of many sends, as JSON")
    parser.add_argument(
        "--convert",
        nargs=2,
        type=Path,
        metavar=("FROM", "TO"),
        help="nanoGPT's ckpt.pt to weights (TO ends in .safetensors) or to a checkpoint; or one to a ckpt.pt",
    )
    parser.add_argument("--sample", metavar="JSON", help="print token ids drawn from a checkpoint, as JSON")
    parser.add_argument("--model", default="", metavar="JSON", help="the model's sizes, for weights")
    parser.add_argument("--experiment", default="", metavar="JSON", help="what ckpt.pt does not say")
    add_flags(parser)
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # while PyTorch is imported there are no ranks to end
        if not is_ignored(number):
            signal.signal(number, lambda number, frame: os._exit(128 + number))
    if arguments.exit_with_stdin:
        threading.Thread(target=_exit_with_stdin, daemon=True).start()
    if arguments.doctor:
        from torchpar.entry import doctor

        print(json.dumps(doctor()))
        return 0
    if arguments.ceiling:
        return _ceiling(arguments.ceiling)
    if arguments.alone:
        return _alone(arguments.alone)
    if arguments.sample:
        return _sample(arguments.sample)
    if arguments.convert:
        return _convert(*arguments.convert, sizes=arguments.model, experiment=arguments.experiment)
    if arguments.run_dir is None:
        parser.error("RUN_DIR is missing")
    try:
        if process := find_process(arguments, os.environ):
            if "RANK" not in os.environ:  # as torchrun says it
                os.environ.update(process.variables)
            from torchpar.comm.process_groups import choose_interface

            if process.address[0]:
                choose_interface(*process.address)
    except ExperimentError as error:
        print(error, file=sys.stderr)
        return BAD_REQUEST
    work = time_collectives if arguments.collectives else train
    return run(arguments.run_dir, partial(work, process=process))


def _ceiling(text: str) -> int:
    import msgspec

    from compare.contract.ceiling import read_ceiling_request
    from torchpar.measure.ceiling import measure

    try:
        print(msgspec.json.encode(measure(read_ceiling_request(text))).decode())
    except (ExperimentError, MissingDevicesError) as error:
        print(error, file=sys.stderr)
        return BAD_REQUEST if isinstance(error, ExperimentError) else MISSING
    return DONE


def _alone(text: str) -> int:
    import msgspec

    from compare.contract.absent import read_absent_request

    try:
        request = read_absent_request("--alone", text)
        from torchpar.alone import run_alone

        print(msgspec.json.encode(run_alone(request)).decode(), flush=True)
    except ExperimentError as error:
        print(error, file=sys.stderr)
        return BAD_REQUEST
    os._exit(DONE)  # the group is not destroyed: see process_groups.leave_group


def _sample(text: str) -> int:
    from compare.numerics.sampling import read_sample_request
    from torchpar.sample import sample

    try:
        print(json.dumps(sample(read_sample_request(text))))
    except ExperimentError as error:
        print(error, file=sys.stderr)
        return BAD_REQUEST
    return DONE


def _convert(source: Path, target: Path, *, sizes: str, experiment: str) -> int:
    import msgspec

    from compare.spec.experiment import Model
    from torchpar.convert import convert
    from torchpar.nanogpt_checkpoint import decode_base, export_checkpoint, import_checkpoint

    try:
        if source.is_dir():
            export_checkpoint(source, target)
        elif target.suffix == ".safetensors":
            convert(source, target, msgspec.json.decode(sizes, type=Model) if sizes else None)
        else:
            import_checkpoint(source, target, decode_base(experiment))
    except (ExperimentError, msgspec.MsgspecError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return BAD_REQUEST
    return DONE


def run(folder: Path, work: Callable[[Path], None]) -> int:
    """Do the request in `folder`, and leave a record or error.json there. Returns the exit code."""
    is_first = int(os.environ.get("RANK", "0")) == 0  # the one that holds the folder, for all ranks
    try:
        with lock_folder(folder) if is_first else contextlib.nullcontext():
            failure = _attempt(folder, work)
            if failure:
                print(failure.message, file=sys.stderr)
                print(failure.traceback, file=sys.stderr, end="")
            # Of ranks that torchrun has started, the first that fails leaves the word: see torchrun.py.
            if failure and is_first and not ("RANK" in os.environ and failure.exit_code == FAILED):
                _leave_word(folder, failure)
            return failure.exit_code if failure else DONE
    except ExperimentError as error:
        print(error, file=sys.stderr)
        return BAD_REQUEST


def train(folder: Path, process: Process | None = None) -> None:
    """Train what folder/request.json asks for, as all ranks or as one of a launcher's."""
    from torchpar import entry, torchrun

    if process:
        require_port(process)
    request = entry.read_request(folder)
    if "RANK" in os.environ:
        torchrun.become_rank(
            partial(entry.train_faulty, request=request, folder=folder),
            folder,
            os.environ,
            devices=request.experiment.layout.devices,
            platform=request.platform,
            timeout_s=request.timeout_s,
            saves=request.experiment.checkpoint.every > 0,
        )
    else:
        request = entry.validate_data(request)
        clear_record(folder)
        entry.start_ranks(request, folder)


def time_collectives(folder: Path, process: Process | None = None) -> None:
    """Time the collectives that folder/request.json asks for, as all ranks or as one of a launcher's."""
    from torchpar import collective_bench, torchrun
    from torchpar.launch import launch

    if process:
        require_port(process)
    request = read_collective_request(folder, side=TORCH.name)
    if process is None or process.is_first:
        clear_record(folder)
    work = partial(collective_bench.time_as_rank, request=request, folder=folder)
    if "RANK" in os.environ:
        torchrun.become_rank(
            work,
            folder,
            os.environ,
            devices=request.ranks,
            platform=request.platform,
            timeout_s=request.timeout_s,
        )
    else:
        launch(work, world_size=request.ranks, platform=request.platform, timeout_s=request.timeout_s)


def _attempt(folder: Path, work: Callable[[Path], None]) -> Failure | None:
    from torchpar.launch import LaunchInterrupted, RanksFailed

    try:
        work(folder)
    except ExperimentError as error:
        return Failure(message=str(error), exit_code=BAD_REQUEST)
    except (MissingDevicesError, MissingPackageError) as error:
        return Failure(message=str(error), exit_code=MISSING)
    except RanksFailed as error:
        return error.failure
    except StoppedEarly as stopped:
        return Failure(message=str(stopped), exit_code=STOPPED)
    except OSError as error:
        full = no_room(error, folder)
        return Failure(message=full or f"{folder}: {error}", exit_code=FAILED if full else BAD_REQUEST)
    except LaunchInterrupted as error:
        code = 128 + error.signal_number
        return Failure(message=describe_exit(code), exit_code=code)
    return None


def _leave_word(folder: Path, failure: Failure) -> None:
    try:
        write_failure(folder, failure)
    except OSError as error:
        if str(error) not in failure.message:  # a full disk has been named already
            print(f"{folder}: cannot leave error.json: {error}", file=sys.stderr)


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
