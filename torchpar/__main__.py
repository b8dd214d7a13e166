"""`python -m torchpar`: the parent of all ranks of a run, or one rank of a launcher.

See `compare.side.main`.
"""

import argparse
import importlib
import os
import sys
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from compare.contract.request import Request
from compare.numerics.data import open_corpus
from compare.side.collective_bench import CollectiveRequest
from compare.side.inputs import starting_sha256
from compare.side.main import Side
from compare.side.main import main as main_of
from compare.side.processes import Process


def run(request: Request | CollectiveRequest, folder: Path, process: Process | None) -> None:
    """Train or time collectives: start all ranks on this machine, or be the rank that a launcher started."""
    from torchpar.launch import launch, run_as_rank

    if isinstance(request, Request):
        from torchpar.train import train

        world_size = request.experiment.layout.devices
        main = partial(train, request=request if process else _checked(request), folder=folder)
    else:
        from torchpar.measure.bench import run_bench

        world_size, main = request.ranks, partial(run_bench, request=request, folder=folder)
    if process:
        run_as_rank(main, process, folder, world_size, platform=request.platform, timeout_s=request.timeout_s)
    else:
        launch(main, world_size, platform=request.platform, timeout_s=request.timeout_s)


def _checked(request: Request) -> Request:
    """The request with the digests of its data and weights, so that the ranks need not check them again."""
    corpus = open_corpus(request.experiment, validated_sha256=request.corpus_sha256)
    is_given = not request.continues and (request.init_from or request.resume)
    init_sha256 = starting_sha256(request) if is_given else request.init_sha256
    if request.platform == "cpu" and sys.platform != "darwin":
        # The first optimizer step imports it, which takes 2 s. Forked ranks inherit it.
        importlib.import_module("torch._dynamo")
    return replace(request, corpus_sha256=corpus.sha256, init_sha256=init_sha256)


def answer(arguments: argparse.Namespace) -> object:
    """The answer to a question."""
    from torchpar.questions import answer

    return answer(arguments)


def main() -> int:
    """Run or answer. Returns the exit code."""
    return main_of(Side("torchpar", run, answer))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a rank's process group must stay (process_groups.py)
