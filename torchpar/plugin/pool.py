"""Groups of workers for the tests of one file, and the servers that fork them."""

import contextlib
import importlib.util
import os
import pickle
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO, NamedTuple

import pytest

from compare.system.workers import Answer, Handle, Outcome, WorkerError, Workers, blamed_of
from torchpar.plugin import session
from torchpar.plugin.marks import Asked
from torchpar.plugin.server import Server, spawn

START_S = 300.0
"""Seconds in which a worker imports and collects its file."""
LEAVE_S = 2.0
"""Seconds in which workers tear down the fixtures of a file."""
STACKS_S = 0.3
"""Seconds in which workers print where they hang."""
FRAMEWORKS = {"ranks": ("torch", "PyTorch"), "devices": ("jax", "JAX")}
IMPORTED = {
    "ranks": (
        "torch",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "pytest",
        "torchpar.testing",
    ),
    "devices": ("jax", "jax.numpy", "pytest", "jaxpar.testing"),
}
"""Imports of a server, by mark."""
NOUNS = {"ranks": "rank", "devices": "process"}


class Group(NamedTuple):
    """The key of a group of workers: tests that share it run in the same processes."""

    kind: str
    count: int
    backend: str
    file: str


@dataclass
class Members:
    """The workers of a group, and the files of their output."""

    workers: Workers
    outputs: list[BinaryIO]
    read: list[int] = field(default_factory=list)
    """Bytes of each output that are shown."""

    def new_output(self) -> list[str]:
        """Output of each worker since the last call."""
        texts = []
        for number, output in enumerate(self.outputs):
            data = os.pread(output.fileno(), 1 << 24, self.read[number])
            self.read[number] += len(data)
            texts.append(data.decode(errors="replace"))
        return texts

    def print_stacks(self, answers: Sequence[Answer]) -> None:
        """Have the workers that do not answer print where they are."""
        silent = [answer.worker for answer in answers if answer.outcome is Outcome.SILENT]
        for number in silent:
            with contextlib.suppress(OSError):
                os.kill(self.workers.members[number][0].pid, signal.SIGUSR1)
        if silent:
            time.sleep(STACKS_S)

    def end(self, *, grace_s: float = 0.0) -> None:
        self.workers.end(grace_s=grace_s)
        for output in self.outputs:
            output.close()


class Pool:
    """All groups and servers of a pytest process."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._groups: dict[Group, Members] = {}
        self._servers: dict[str, Server] = {}
        self._folders: pytest.TempPathFactory = config._tmp_path_factory  # ty: ignore[missing-attribute]
        self.platform: str = config.getoption("ranks_platform")
        self.shows_output = config.option.capture == "no"

    def run(
        self, item: pytest.Item, following: str, asked: Asked, timeout_s: float
    ) -> tuple[list[Answer], Members]:
        """Run a test in the workers of its group. The caller calls `end_group` after a failure.

        Raises WorkerError: a worker cannot start. Raises ImportError: the framework is missing.
        """
        members = self._members(item, asked)
        call = pickle.dumps((_plain_nodeid(item.nodeid), _plain_nodeid(following)))
        answers = members.workers.call(call, timeout_s=timeout_s)
        members.print_stacks(answers)
        return answers, members

    def group_of(self, item: pytest.Item, asked: Asked) -> Group:
        return Group(asked.kind, asked.count, asked.backend, str(item.path))

    def end_group(self, group: Group, *, grace_s: float = 0.0) -> None:
        if members := self._groups.pop(group, None):
            members.end(grace_s=grace_s)

    def keep_only(self, file: Path) -> None:
        """End the groups of other files."""
        for group in [group for group in self._groups if group.file != str(file)]:
            self.end_group(group, grace_s=LEAVE_S)

    def end(self) -> None:
        """End all processes."""
        for group in [*self._groups]:
            self.end_group(group, grace_s=LEAVE_S)
        for server in self._servers.values():
            server.end()
        self._servers.clear()

    def _members(self, item: pytest.Item, asked: Asked) -> Members:
        group = self.group_of(item, asked)
        if group not in self._groups:
            require(asked.kind)
            self._groups[group] = self._start(group)
            try:
                self._await(self._groups[group])
            except BaseException:
                self.end_group(group)
                raise
        return self._groups[group]

    def _await(self, members: Members) -> None:
        """Wait until the workers have collected the file. Raises WorkerError."""
        answers = members.workers.call(pickle.dumps(("", "")), timeout_s=START_S)
        if blamed_of(answers):
            text = members.workers.describe(answers, timeout_s=START_S)
            raise WorkerError("\n".join([text, *filter(None, members.new_output())]))

    def _start(self, group: Group) -> Members:
        folder = self._folders.mktemp(group.kind)  # pytest removes old folders
        members = 1 if group.kind == "devices" else group.count
        outputs: list[BinaryIO] = []
        for number in range(0 if self.shows_output else members):
            outputs.append((folder / f"output.{number}").open("a+b"))

        def start(number: int) -> tuple[Handle, Connection]:
            work = {
                **{"kind": group.kind, "number": number, "count": group.count, "backend": group.backend},
                **{"platform": self.platform, "rendezvous": str(folder / "rendezvous"), "file": group.file},
                **{"options": session.options_of(self._config), "path": sys.path},
                **{"environment": dict(os.environ), "folder": str(folder)},
            }
            work["options"]["basetemp"] = str(folder / f"tmp.{number}")
            output = outputs[number] if outputs else None
            if sys.platform == "linux" and self.platform == "cpu":
                return self._server(group.kind).start(work, output)
            return spawn(work, output)

        workers = Workers(members, start, noun=NOUNS[group.kind])
        return Members(workers, outputs, [0] * len(outputs))

    def _server(self, kind: str) -> Server:
        if kind not in self._servers:
            self._servers[kind] = Server(IMPORTED[kind])
        return self._servers[kind]


def require(kind: str) -> None:
    """Raises ImportError with one line: the framework of a mark is not installed, or `compare` is hidden."""
    module, name = FRAMEWORKS[kind]
    if not importlib.util.find_spec(module):
        raise ImportError(f"@pytest.mark.{kind} needs {name}: pip install 'shardpair[{module}]'")


def _plain_nodeid(nodeid: str) -> str:
    """A node id without the suffix of xdist's `--dist loadgroup`."""
    return nodeid.rpartition("@")[0] if "@" in nodeid.rpartition("]")[2] else nodeid
