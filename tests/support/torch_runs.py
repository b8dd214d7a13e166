"""Runs of torchpar's engines on one device, in a test's own process."""

from pathlib import Path
from typing import Any

from compare.contract.record import Record, read_record
from compare.contract.request import REQUEST, Request
from compare.spec.experiment import Experiment
from compare.system.json_files import write_json
from torchpar import train
from torchpar.launch import Rank


def trained(folder: Path, experiment: Experiment, engine: str = "torch-manual", **asked: Any) -> Record:
    """The record of a run of one rank."""
    request = Request(engine=engine, experiment=experiment, **asked)
    folder.mkdir(exist_ok=True)
    write_json(folder / REQUEST, request)
    train.train(Rank(rank=0, world_size=1, local_rank=0), request=request, folder=folder)
    return read_record(folder)
