"""Tests on several ranks. `@on_ranks` above a test runs it on four ranks of gloo.

`@on_ranks_apart` runs it on eight processes without a group, in a folder of their own; see `rank_of`. The
ranks of a file start once, run one test after the other, and are replaced if one of them fails.
"""

import functools
import importlib
import inspect
import os
import pickle
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from compare.contract.ledger import WORLD
from compare.system.workers import Handle, Workers, answer_calls
from tests.support import processes, warm
from tests.support.processes import PATIENCE_S
from torchpar import testing
from torchpar.comm import process_groups
from torchpar.comm.collectives import Axis, Call, observers
from torchpar.comm.gloo import choose_interface, is_consequence
from torchpar.launch import Rank

RANKS = 4
CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers in float64, equal on all ranks."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


ALONE = Axis("dp_replicate", size=1, rank=0, group=None)
"""An axis of one rank."""


def axis() -> Axis:
    """All ranks, seen from one of them."""
    return Axis.from_group(process_groups.world_group())


@contextmanager
def counted() -> Generator[Counter[Call]]:
    """Bytes of the full (gathered) tensors of torchpar's collectives inside."""
    sent = Counter[Call]()

    def observer(call: Call, full: torch.Tensor, ranks: int) -> AbstractContextManager:
        return nullcontext(sent.update({call: full.nbytes}))

    observers.append(observer)
    try:
        yield sent
    finally:
        observers.remove(observer)


def rank_of(number: int, count: int, rendezvous: Path) -> Rank:
    """One of several ranks that meet in a file."""
    here = {"local_rank": number, "rendezvous": rendezvous, "timeout_s": PATIENCE_S}
    return Rank(rank=number, world_size=count, **here)


def on_ranks(body: Callable[..., None], fixture: str = "ranks") -> Callable[..., None]:
    """Make `body(rank)` a test that all four ranks run; it passes if it passes on each.

    Further parameters of `body` are those of pytest.mark.parametrize, not fixtures: they must be picklable.
    """

    @functools.wraps(body)
    def test(**parameters: Any) -> None:
        parameters.pop(fixture).run(test, **parameters)

    _, *others = inspect.signature(body).parameters.values()
    first = inspect.Parameter(fixture, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = inspect.Signature([first, *others])  # what pytest sees
    return test


on_ranks_apart = functools.partial(on_ranks, fixture="ranks_apart")


@dataclass
class Ranks:
    """Processes that meet in a folder with the first test and live until one fails."""

    folder: Path
    count: int = RANKS
    joins: bool = True
    """Whether they are ranks of one group of gloo."""
    workers: Workers | None = None
    starts: int = 0

    def run(self, test: Callable[..., None], **parameters: object) -> None:
        """Run a test made by `on_ranks` on every rank; if any rank fails, this fails as that rank did."""
        try:
            workers = self.workers or self._start()
            call = pickle.dumps((test.__module__, test.__qualname__, parameters))
            answers = workers.call(call, timeout_s=PATIENCE_S)
            if failure := workers.describe(answers, timeout_s=PATIENCE_S):
                pytest.fail(failure, pytrace=False)
            for process, _ in workers.members:
                processes.staying |= warm.all_of(process.pid)
        except BaseException:  # Ctrl-C and pytest-timeout too: ranks that are still busy are of no more use
            self.end()
            raise

    def end(self) -> None:
        """End all ranks. The next test starts new ranks."""
        if self.workers:
            self.workers.end()
        self.workers = None
        processes.staying.clear()

    def _start(self) -> Workers:
        self.starts += 1
        rendezvous = self.folder / f"rendezvous.{self.starts}"

        def start(rank: int) -> tuple[Handle, Connection]:
            ours, theirs = Pipe()
            with theirs:
                how = {"stdin": theirs.fileno(), "stdout": None, "stderr": None}
                return warm.start_forked(_serve, rank, rendezvous, self.joins, **how), ours

        self.workers = Workers(self.count, start)
        return self.workers


def _serve(rank: int, rendezvous: Path, joins: bool) -> None:
    """A rank's life: run what is sent, and answer with the error, if any, until the parent hangs up."""
    pipe = Connection(os.dup(0))
    torch.set_num_threads(1)
    testing.axis_of_world = WORLD  # tests of one file share ranks, but no meshes
    choose_interface("127.0.0.1")
    if joins:
        process_groups.join_ranks(rank_of(rank, RANKS, rendezvous), "cpu")
    else:
        os.chdir(rendezvous.parent)

    def do(message: bytes) -> None:
        module, name, parameters = pickle.loads(message)
        getattr(importlib.import_module(module), name).__wrapped__(rank, **parameters)

    answer_calls(pipe, do, is_consequence)
    os._exit(0)  # a group is not destroyed: see process_groups.leave_group
