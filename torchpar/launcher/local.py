"""The parent of the ranks: starts them, watches them, names the first that fails, and ends the rest.

Ranks report their own errors through a pipe, and their progress through shared memory (`rank.Heartbeat`).
A second pipe that only the parent holds open tells them of the parent's end: no orphan, even after SIGKILL.
"""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, SpawnContext
from pathlib import Path
from typing import NoReturn

from compare.host.disk import RENDEZVOUS
from compare.host.signals import is_ignored
from torchpar.comm.rank import Heartbeat, Rank
from torchpar.launcher.supervisor import Child, make_report, supervise

TERMINATE_GRACE_S = 0.5
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class LaunchInterrupted(BaseException):
    """The parent got SIGINT or SIGTERM; the ranks have been ended."""

    def __init__(self, signal_number: int):
        super().__init__(signal_number)
        self.signal_number = signal_number


def launch(
    main: Callable[[Rank], None],
    *,
    world_size: int,
    folder: Path,
    timeout_s: float = 600.0,
    spawn: bool = False,
) -> None:
    """Run `main(rank)` in `world_size` processes on this machine, and wait until all are done.

    Args:
        main: each rank's function; picklable if `spawn`.
        folder: for the file through which the ranks meet, if it has to have a name; then it is removed.
        timeout_s: seconds without progress of any rank after which the run counts as hung.
        spawn: start fresh interpreters. Forking takes 0.1 s, but a GPU or macOS does not survive it.

    Raises:
        RanksFailed: a rank failed, was killed, or hangs. All ranks have been ended.
        LaunchInterrupted: SIGINT or SIGTERM came. All ranks have been ended.
    """
    context: SpawnContext | ForkContext = SpawnContext() if spawn else ForkContext()
    heartbeat = Heartbeat(context.RawArray("q", Heartbeat.cells_for(world_size)))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    lifeline, held_by_parent = context.Pipe(duplex=False)
    children: list[Child] = []
    with _signals_raise(), _meeting_point(folder) as rendezvous:
        try:
            for number in range(world_size):
                rank = Rank(
                    rank=number,
                    world_size=world_size,
                    local_rank=number,
                    heartbeat=heartbeat,
                    rendezvous=rendezvous,
                    timeout_s=timeout_s,
                    launcher_cpu_s=usage.ru_utime + usage.ru_stime,
                )
                reports, sender = context.Pipe(duplex=False)
                inherited = [] if spawn else [held_by_parent, reports, *(c.reports for c in children)]
                process = context.Process(target=_be_rank, args=(main, rank, sender, lifeline, inherited))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # fork beside NumPy's idle threads
                    process.start()
                children.append(Child(number, process, reports))
                sender.close()
            supervise(children, heartbeat, timeout_s)
        finally:
            _ignore_signals()
            _end(children)
            held_by_parent.close()
            lifeline.close()


@contextlib.contextmanager
def _meeting_point(folder: Path) -> Generator[Path]:
    """The file through which the ranks meet. On Linux it has no name, so that nothing is left of it ever."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("rendezvous")
        try:
            yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        finally:
            os.close(descriptor)
        return
    path = folder.absolute() / f"{RENDEZVOUS}.{os.getpid()}"
    path.unlink(missing_ok=True)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _be_rank(
    main: Callable[[Rank], None],
    rank: Rank,
    reports: Connection,
    lifeline: Connection,
    inherited: list[Connection],
) -> NoReturn:
    """A rank's whole life. Leaves by os._exit: destructors of a broken process group may block."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if not is_ignored(number):
            signal.signal(number, signal.SIG_DFL)
    for end in inherited:
        end.close()
    _ask_linux_to_die_with_parent()
    threading.Thread(target=_leave_with_parent, args=(lifeline,), daemon=True).start()
    code = 0
    try:
        main(rank)
    except BaseException as error:
        code = 1
        reports.send(make_report(error, rank))
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _ask_linux_to_die_with_parent() -> None:
    """SIGKILL at the parent's end reaches even a stopped rank, whose thread cannot watch the pipe."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _leave_with_parent(lifeline: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(1)


def _end(children: list[Child]) -> None:
    """End every rank that still runs, also a stopped one, and reap all."""
    for child in children:
        if child.process.exitcode is None:
            child.process.terminate()
    deadline = time.monotonic() + TERMINATE_GRACE_S
    for child in children:
        child.process.join(max(0.0, deadline - time.monotonic()))
        if child.process.exitcode is None:
            child.process.kill()  # SIGTERM does not reach a stopped process
            child.process.join()
        child.reports.close()


@contextlib.contextmanager
def _signals_raise() -> Generator[None]:
    """SIGINT and SIGTERM, unless ignored, raise LaunchInterrupted in the main thread; elsewhere nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise LaunchInterrupted(number)

    heard = [number for number in (signal.SIGINT, signal.SIGTERM) if not is_ignored(number)]
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    """A second Ctrl-C must not interrupt the clean-up."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def bind_to_loopback() -> None:
    """Keep gloo off the network when all ranks are on this machine; a user's own choice is left alone."""
    interfaces = {name for _, name in socket.if_nameindex()}
    for name in ("lo", "lo0"):
        if name in interfaces:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
