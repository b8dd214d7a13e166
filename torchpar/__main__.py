"""`python -m torchpar`: as all ranks of this machine, whose parent it is, or as one rank.

It is one rank under srun or torchrun, or with their variables. See `compare.side.command`.
"""

import argparse
import os
import signal
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from compare.contract.record import clear_record, leave_failure
from compare.contract.request import decode_request, read_request, read_request_file
from compare.side.collective_bench import CollectiveRequest
from compare.side.command import parse_arguments, told_by
from compare.side.ending import DONE, StopRequest
from compare.side.process_states import State, announce, say
from compare.side.processes import Process, find_process
from compare.side.run_lock import lock_folder
from compare.system.signals import is_ignored, when_stdin_ends

STDIN_GRACE_S = 5.0
ASKED_IN_JSON = {
    "ceiling": "how fast matrices are multiplied",
    "sample": "token ids drawn from a checkpoint",
}


def main() -> int:
    """Run or answer. Returns the exit code; the first rank holds the folder, for all."""
    arguments = parse_arguments("torchpar", ASKED_IN_JSON)
    for number in (signal.SIGINT, signal.SIGTERM):  # while PyTorch is imported there are no ranks to end
        if not is_ignored(number):
            signal.signal(number, lambda number, frame: os._exit(128 + number))
    if arguments.exit_with_stdin:
        when_stdin_ends(_end_as_sigterm_does)
    folder = arguments.run_dir
    try:
        if arguments.question:
            print(msgspec.json.encode(answer(arguments)).decode(), flush=True)
            return DONE
        by_torchrun = "RANK" in os.environ  # which srun may have started
        process = find_process({k: v for k, v in os.environ.items() if not (by_torchrun and "SLURM" in k)})
        if process and not by_torchrun:
            os.environ.update(process.variables)
        is_first = os.environ.get("RANK", "0") == "0"
        with lock_folder(folder) if is_first else nullcontext():
            if process:
                announce(folder, process)
            try:
                (time_collectives if arguments.collectives else train)(folder, process)
                return DONE
            except Exception as error:
                failure = told_by(error, folder)
                if failure:
                    if process:
                        message = f"{process.name}: {failure.message}"
                        failure = replace(failure, message=message, rank=process.number)
                        say(folder, State(number=process.number, failure=failure))
                    if is_first:
                        leave_failure(folder, failure)
                raise
    except Exception as error:
        if not (failure := told_by(error, folder)):
            raise
        print(failure.message, file=sys.stderr)
        print(failure.traceback, file=sys.stderr, end="")
        return failure.exit_code


def answer(arguments: argparse.Namespace) -> object:
    """The answer to a question, to be printed as JSON; None of a conversion, which leaves files."""
    match arguments.question:
        case "doctor":
            import torch

            from compare.system.facts import versions
            from torchpar.comm.mesh import PACKAGES, device_kind

            gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
            return {
                "versions": versions(PACKAGES),
                "cpu_devices": f"any number of gloo ranks, one thread each, on {os.cpu_count() or 1} cores",
                "gpus": [device_kind(torch.device("cuda", index)) for index in gpus],
            }
        case "ceiling":
            from compare.side.ceiling import CeilingRequest
            from torchpar.measure.ceiling import measure

            return measure(decode_request(arguments.ceiling, CeilingRequest, source="--ceiling"))
        case "sample":
            from compare.numerics.sampling import SampleRequest
            from torchpar.sample import sample

            return sample(decode_request(arguments.sample, SampleRequest, source="--sample"))
    from compare.spec.experiment import Experiment
    from torchpar.nanogpt_checkpoint import export_checkpoint, import_checkpoint

    source, target = arguments.convert
    if source.is_dir():
        export_checkpoint(source, target)
    else:
        said = arguments.base
        import_checkpoint(source, target, msgspec.json.decode(said, type=Experiment) if said else None)
    return None


def train(folder: Path, process: Process | None) -> None:
    """Train what folder/request.json asks for, as all ranks or as one of a launcher's."""
    request = read_request(folder, "torchpar")
    if request.experiment.checkpoint.every:
        StopRequest.listen()  # importing PyTorch takes seconds
    from torchpar import torchrun
    from torchpar.train import start_ranks
    from torchpar.train import train as train_as_rank

    if "RANK" not in os.environ:
        return start_ranks(request, folder)
    work = partial(train_as_rank, request=request, folder=folder)
    torchrun.become_rank(work, folder, request, process, devices=request.experiment.layout.devices)


def time_collectives(folder: Path, process: Process | None) -> None:
    """Time the collectives that folder/request.json asks for, as all ranks or as one of a launcher's."""
    from torchpar import torchrun
    from torchpar.collective_bench import time_as_rank
    from torchpar.launch import launch

    request = read_request_file(folder, CollectiveRequest)
    work = partial(time_as_rank, request=request, folder=folder)
    if "RANK" in os.environ:
        return torchrun.become_rank(work, folder, request, process, devices=request.ranks)
    clear_record(folder)
    launch(work, world_size=request.ranks, platform=request.platform, timeout_s=request.timeout_s)


def _end_as_sigterm_does() -> None:
    """End this process and its ranks."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STDIN_GRACE_S)
    os._exit(128 + signal.SIGTERM)  # the main thread is deep in C; the ranks notice that it is gone


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # under torchrun this is a rank, whose process group must stay (process_groups.py)
