"""Runs of torchpar's engines in a test's own process."""

from collections.abc import Callable
from multiprocessing.context import ForkContext
from pathlib import Path
from typing import Any

from compare.contract.record import Record, read_record
from compare.contract.request import REQUEST, Request
from compare.spec.experiment import Experiment
from compare.system.json_files import write_json
from torchpar import train
from torchpar.__main__ import run
from torchpar.launch import Rank


def alone(request: Request, folder: Path) -> None:
    train.train(Rank(rank=0, world_size=1, local_rank=0), request=request, folder=folder)


def of_ranks(request: Request, folder: Path) -> None:
    """All ranks, under a parent of their own: after a launch SIGINT and SIGTERM are not heard any more."""
    parent = ForkContext().Process(target=run, args=(request, folder, None))
    parent.start()
    parent.join()
    assert parent.exitcode == 0


def trained(
    folder: Path, experiment: Experiment, engine: str = "torch-manual", *, by: Callable = alone, **asked: Any
) -> Record:
    """The record of a run: of one rank, or by `of_ranks` of all."""
    request = Request(engine=engine, experiment=experiment, **asked)
    folder.mkdir(exist_ok=True)
    write_json(folder / REQUEST, request)
    by(request, folder)
    return read_record(folder)
