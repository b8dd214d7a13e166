"""A process that imports modules once, and forks workers from then on.

    pytest ── server, with the framework ── fork: a worker
                                         ── fork: a worker

A worker has a connection to pytest, and a file for its output. Each process is killed with its parent. On
other systems than Linux, and for GPUs, `spawn` starts each worker as a program of its own.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, BinaryIO, NoReturn

from compare.system.signals import describe_exit
from compare.system.workers import Handle, end_with_parent

MAX_MESSAGE = 1_000_000
KILLED = -signal.SIGKILL
Work = dict[str, Any]
"""The job of a worker, as JSON (`torchpar.plugin.session.run`)."""


class Server:
    """The parent's side of a server, which imports `modules`."""

    def __init__(self, modules: Sequence[str]):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  until `end`
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _program("serve", list(modules), os.getpid())],
                stdin=theirs.fileno(),
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C in a terminal is for pytest alone
            )

    def start(self, work: Work, output: BinaryIO | None) -> tuple[Handle, Connection]:
        """Fork a worker. Raises ChildProcessError: the server has ended."""
        ours, theirs = Pipe()
        with theirs:
            files = [theirs.fileno(), *([output.fileno()] * 2 if output else (1, 2))]
            socket.send_fds(self._socket, [json.dumps(work).encode()], files)
        return _Fork(int(self._reply()), self), ours

    def exit_code(self, pid: int) -> int:
        """Wait for the end of a worker."""
        try:
            self._socket.send(json.dumps(pid).encode())
            return int(self._reply())
        except OSError:  # the workers of a dead server are dead
            return KILLED

    def _reply(self) -> bytes:
        if reply := self._socket.recv(MAX_MESSAGE):
            return reply
        code = self._process.wait()
        self._errors.seek(0)
        raise ChildProcessError(
            f"the server of workers: {describe_exit(code)}\n{self._errors.read().decode()}"
        )

    def end(self) -> None:
        """End the server. Its workers end with it."""
        self._process.kill()
        self._process.wait()
        self._socket.close()
        self._errors.close()


@dataclass
class _Fork:
    """A worker that a server forked, in a process group of its own."""

    pid: int
    server: Server
    code: int | None = None

    def kill(self) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self.code is None:
            self.code = self.server.exit_code(self.pid)
        return self.code


class _Program(subprocess.Popen):
    """A worker that is a program of its own."""

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def spawn(work: Work, output: BinaryIO | None) -> tuple[Handle, Connection]:
    """Start a worker as a program of its own."""
    ours, theirs = Pipe()
    with theirs:
        program = _Program(
            [sys.executable, "-c", _program("work", work, os.getpid())],
            stdin=theirs.fileno(),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return program, ours


def _program(function: str, *arguments: object) -> str:
    path = [folder or os.getcwd() for folder in sys.path]
    call = f"server.{function}(*json.loads({json.dumps(arguments)!r}))"
    return f"import json, sys; sys.path[:] = {path!r}; from torchpar.plugin import server; {call}"


def serve(modules: list[str], parent: int) -> NoReturn:
    """The life of a server: its standard input is the socket of its parent."""
    end_with_parent(parent)
    for module in modules:
        importlib.import_module(module)
    here, asker = os.getpid(), socket.socket(fileno=os.dup(0))
    while True:
        message, files, *_ = socket.recv_fds(asker, MAX_MESSAGE, 3)
        if not message:
            os._exit(0)
        asked = json.loads(message)
        if isinstance(asked, int):
            _, status = os.waitpid(asked, 0)
            asker.send(str(os.waitstatus_to_exitcode(status)).encode())
        elif pid := os.fork():
            for file in files:
                os.close(file)
            with contextlib.suppress(OSError):  # the fork does the same: the first wins
                os.setpgid(pid, pid)
            asker.send(str(pid).encode())
        else:
            asker.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            os.setpgid(0, 0)
            work(asked, here)


def work(asked: Work, parent: int) -> NoReturn:
    """The life of a worker: its standard input is the connection to pytest."""
    end_with_parent(parent)
    pipe = Connection(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):  # a worker that is killed loses no line
        stream = open(number, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
    try:
        from torchpar.plugin import session

        session.run(pipe, asked)
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)  # destructors of a broken process group may block
