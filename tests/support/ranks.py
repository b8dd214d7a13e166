"""Tests on four gloo ranks: `@on_ranks` above a test makes it one.

The ranks of a file start once, run one test after the other, and are replaced if one of them fails.
"""

import functools
import importlib
import inspect
import os
import signal
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import processes
import pytest
import torch
import warm
from processes import PATIENCE_S

from compare.host.signals import describe_exit
from torchpar.comm import process_groups
from torchpar.comm.collectives import Axis, Call, observers

RANKS = 4
CPU = torch.device("cpu")
GRACE_S = 1.0  # for the other ranks to say what they know, once one has failed


def axis() -> Axis:
    """All ranks, seen from one of them."""
    return Axis.of(None)


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


def on_ranks(body: Callable[..., None]) -> Callable[..., None]:
    """Make `body(rank)` a test that all four ranks run; it passes if it passes on each.

    Further parameters of `body` are those of pytest.mark.parametrize, not fixtures: they must be picklable.
    """

    @functools.wraps(body)
    def test(ranks: Ranks, **parameters: object) -> None:
        ranks.run(test, **parameters)

    _, *others = inspect.signature(body).parameters.values()
    fixture = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = inspect.Signature([fixture, *others])  # what pytest sees
    return test


@dataclass
class Member:
    """One rank, as its parent sees it."""

    rank: int
    process: subprocess.Popen
    pipe: Connection
    failure: str = ""
    is_consequence: bool = False  # it only tells of the loss of another rank


@dataclass
class Ranks:
    """Four processes in one group, which meet in a folder with the first test and live until one fails."""

    folder: Path
    timeout_s: float = PATIENCE_S  # of a test
    members: list[Member] = field(default_factory=list)
    starts: int = 0

    def run(self, test: Callable[..., None], **parameters: object) -> None:
        """Run a test made by `on_ranks` on every rank; if any rank fails, this fails as that rank did."""
        try:
            if not self.members:
                self._start()
            for member in self.members:
                member.pipe.send((test.__module__, test.__qualname__, parameters))
            silent = self._collect()
            # False sorts first: the cause before what it did to others
            failed = sorted((one for one in self.members if one.failure), key=lambda one: one.is_consequence)
            if failed:
                pytest.fail(failed[0].failure, pytrace=False)
            if silent:
                pytest.fail(f"no answer within {self.timeout_s:g} s from ranks {silent}", pytrace=False)
            for member in self.members:
                processes.staying |= warm.all_of(member.process.pid)
        except BaseException:  # Ctrl-C and pytest-timeout too: ranks that are still busy are of no more use
            self.end()
            raise

    def end(self) -> None:
        """End every rank, whatever it does; the next test finds new ones."""
        for member in self.members:
            member.process.kill()
        for member in self.members:
            member.process.wait()
            member.pipe.close()
        self.members.clear()
        processes.staying.clear()

    def _start(self) -> None:
        self.starts += 1
        rendezvous = self.folder / f"rendezvous.{self.starts}"
        for rank in range(RANKS):
            ours, theirs = Pipe()
            how = {"stdin": theirs.fileno(), "stdout": None, "stderr": None}
            process = warm.start_forked(_serve, rank, rendezvous, **how)
            theirs.close()
            self.members.append(Member(rank, process, ours))

    def _collect(self) -> list[int]:
        """Wait for every rank's answer, but not long once one has failed. Returns those without any."""
        silent = {member.pipe: member for member in self.members}
        deadline = time.monotonic() + self.timeout_s
        while silent:
            ready = wait(list(silent), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                member = silent.pop(pipe)
                _read_answer(member)
                if member.failure:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return [member.rank for member in silent.values()]


def _read_answer(member: Member) -> None:
    try:
        member.failure, member.is_consequence = member.pipe.recv()
    except (EOFError, OSError):
        code = member.process.wait()
        member.failure = f"rank {member.rank}: {describe_exit(code, when='in a test')}"
        member.is_consequence = code == -signal.SIGABRT  # how C++ reacts to a lost peer


def _serve(rank: int, rendezvous: Path) -> None:
    """A rank's life: join, run what is sent, and answer with the error, if any, until the parent hangs up."""
    pipe = Connection(os.dup(0))
    torch.set_num_threads(1)
    process_groups.choose_interface("127.0.0.1")
    try:
        process_groups.join_group(
            rank=rank, world_size=RANKS, device=CPU, rendezvous=rendezvous, timeout_s=PATIENCE_S
        )
        while True:
            module, name, parameters = pipe.recv()
            getattr(importlib.import_module(module), name).__wrapped__(rank, **parameters)
            pipe.send(("", False))
    except EOFError:
        pass
    except BaseException as error:  # this rank has no future: the parent ends all
        text = f"rank {rank} failed:\n" + "".join(traceback.format_exception(error))
        pipe.send((text, process_groups.is_consequence(error)))
        pipe.poll(None)  # until then a peer must not see this one hang up
    os._exit(0)  # a group is not destroyed: see process_groups.leave_group
