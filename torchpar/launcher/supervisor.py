"""Watching the ranks: progress, the first failure among many, and who is behind when nothing moves."""

import contextlib
import functools
import signal
import time
import traceback
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import psutil

from compare.contract.divergence import DivergedError
from compare.contract.record import Failure
from compare.host.disk import DiskFull
from compare.host.facts import Activity, look_s
from compare.host.signals import describe_exit
from torchpar.comm.process_groups import is_consequence
from torchpar.comm.rank import Heartbeat, Rank

POLL_S = 0.1
# Peers may notice a killed rank before the parent does: so long it waits for a better explanation.
CAUSE_GRACE_S = 1.0
# A terminal sends Ctrl-C to the ranks and to the parent: so long the parent waits for its own signal.
SIGINT_GRACE_S = 0.3


class RanksFailed(Exception):
    """The run failed; `failure` says which rank, and what."""

    def __init__(self, failure: Failure):
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True)
class RankFailure:
    """Message and traceback of a failing rank."""

    rank: int
    message: str
    traceback: str
    is_consequence: bool

    @property
    def failure(self) -> Failure:
        """The failure as the record states it."""
        return Failure(
            message=self.message,
            traceback=self.traceback,
            rank=self.rank,
            is_consequence=self.is_consequence,
        )


@dataclass
class Child:
    """A rank as its parent sees it."""

    rank: int
    process: BaseProcess
    reports: Connection
    report: RankFailure | None = None


def make_report(error: BaseException, rank: Rank) -> RankFailure:
    """A report of an error that ended a rank."""
    text = " ".join(str(error).split())
    if isinstance(error, DivergedError):  # on all ranks alike
        return RankFailure(rank=-1, message=text, traceback="", is_consequence=False)
    stack = "".join(traceback.format_exception(error))
    if isinstance(error, DiskFull):  # whose message says it all
        stack = ""
    else:
        text = f"{type(error).__name__}: {text}"
    return RankFailure(
        rank=rank.rank,
        message=f"rank {rank.rank} failed {rank.position.when}: {text}",
        traceback=stack,
        is_consequence=is_consequence(error),
    )


def supervise(children: list[Child], heartbeat: Heartbeat, timeout_s: float) -> None:
    """Return when all ranks are done; raise RanksFailed when one failed or none makes progress.

    Before its first step a rank makes progress as long as it uses the processor: it is not known how long
    importing, drawing weights and wrapping take. A phase of a step has to end within `timeout_s`.
    """
    positions = [heartbeat.position(child.rank) for child in children]
    activities = {child.rank: Activity(functools.partial(_cpu_seconds, child)) for child in children}
    last_progress = last_look = time.monotonic()
    while True:
        running = [child for child in children if child.process.exitcode is None]
        if any(child.process.exitcode for child in children) or _collect(children):
            raise RanksFailed(_first_failure(children, heartbeat))
        if not running:
            return
        now = [heartbeat.position(child.rank) for child in children]
        if now != positions:
            positions, last_progress = now, time.monotonic()
        elif time.monotonic() - last_look > look_s(timeout_s):
            last_look = time.monotonic()
            starting = [child.rank for child in running if not heartbeat.position(child.rank).in_step]
            if any([activities[rank].is_busy() for rank in starting]):  # a list: each has to be asked
                last_progress = last_look
        if time.monotonic() - last_progress > timeout_s:
            raise RanksFailed(_hang(running, heartbeat, timeout_s))
        watched = [child.process.sentinel for child in running]
        connection.wait(watched, timeout=POLL_S)


def _collect(children: list[Child]) -> bool:
    """Read the reports that are there. Returns whether there is any."""
    for child in children:
        if child.report is None and not child.reports.closed:
            with contextlib.suppress(EOFError, OSError):
                if child.reports.poll():
                    child.report = child.reports.recv()
    return any(child.report for child in children)


def _first_failure(children: list[Child], heartbeat: Heartbeat) -> Failure:
    """The cause: a rank's own error, else a death, else an error that tells of a lost peer."""
    if any(child.process.exitcode == -signal.SIGINT for child in children):
        time.sleep(SIGINT_GRACE_S)
    deadline = time.monotonic() + CAUSE_GRACE_S
    while True:
        _collect(children)
        reports = [child.report for child in children if child.report]
        own = [report for report in reports if not report.is_consequence]
        silent = [child for child in children if child.process.exitcode and not child.report]
        # An abort is how C++ reacts to a lost peer, so it may be a consequence too.
        killed = [child for child in silent if child.process.exitcode != -signal.SIGABRT]
        if own or killed or time.monotonic() > deadline:
            break
        time.sleep(POLL_S / 2)
    if own:
        return own[0].failure
    for child in killed or silent:
        return Failure(message=_death(child, heartbeat), rank=child.rank)
    return reports[0].failure


def _death(child: Child, heartbeat: Heartbeat) -> str:
    when, code = heartbeat.position(child.rank).when, child.process.exitcode or 0
    return f"rank {child.rank} {'was ' if code < 0 else ''}{describe_exit(code, when=when)}"


def _cpu_seconds(child: Child) -> float:
    """User plus system seconds; 0 for one that has ended."""
    try:
        times = psutil.Process(child.process.pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def _hang(running: list[Child], heartbeat: Heartbeat, timeout_s: float) -> Failure:
    """Name the ranks that are stopped, perhaps inside a collective, or else those behind the others."""
    positions = {child.rank: heartbeat.position(child.rank) for child in running}
    stopped = [child.rank for child in running if _is_stopped(child)]
    fewest = min(position.beats for position in positions.values())
    behind = stopped or [rank for rank, position in positions.items() if position.beats == fewest]
    ahead = [rank for rank in positions if rank not in behind]
    where = positions[behind[0]]
    if not ahead and len(behind) > 1:
        return Failure(message=f"no rank made progress for {timeout_s:g} s: all are in {where}")
    verb = "it is" if len(behind) == 1 else "they are"
    verb += " stopped" if stopped else ""
    message = f"{_ranks(behind)} made no progress for {timeout_s:g} s: {verb} in {where}"
    if ahead:
        others = ", ".join(sorted({str(positions[rank]) for rank in ahead}))
        message += f", while {_ranks(ahead)} {'wait' if len(ahead) > 1 else 'waits'} in {others}"
    return Failure(message=message, rank=behind[0])


def _is_stopped(child: Child) -> bool:
    """True if the process is suspended: SIGSTOP, Ctrl-Z, a debugger."""
    try:
        return psutil.Process(child.process.pid).status() in (
            psutil.STATUS_STOPPED,
            psutil.STATUS_TRACING_STOP,
        )
    except psutil.NoSuchProcess:
        return False


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
