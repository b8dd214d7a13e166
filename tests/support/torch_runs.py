"""Runs of torchpar's engines in a test's own process."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.context import ForkContext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from compare.contract.record import Record, read_record
from compare.contract.request import REQUEST, Request
from compare.spec.experiment import Experiment
from compare.system.json_files import write_json
from torchpar import train
from torchpar.__main__ import run
from torchpar.launch import Rank
from torchpar.run import Run


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


def spoiled(spoil: Callable[[Run], None]) -> AbstractContextManager:
    """Change each run after its set-up."""
    set_up = train.set_up

    def wrong(*args: Any, **options: Any) -> Run:
        run = set_up(*args, **options)
        spoil(run)
        return run

    return patch.object(train, "set_up", wrong)


def change_update(run: Run, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Weights become `change(before, after)` after each optimizer step."""
    before = dict[str, torch.Tensor]()

    def remember(*optimizer_and_arguments: Any) -> None:
        before.update({name: p.detach().clone() for name, p in run.engine.parameters.items()})

    @torch.no_grad()
    def move(*optimizer_and_arguments: Any) -> None:
        for name, parameter in run.engine.parameters.items():
            parameter.copy_(change(before[name], parameter))

    run.engine.optimizer.register_step_pre_hook(remember)
    run.engine.optimizer.register_step_post_hook(move)
