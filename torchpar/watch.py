"""Watching the ranks: progress, the first failure among many, and who is behind when nothing moves."""

import contextlib
import signal
import time
import traceback
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import psutil

from compare.contract.record import Failure
from torchpar.groups import is_consequence
from torchpar.rank import Heartbeat, Rank

POLL_S = 0.1
# Peers may notice a killed rank before the parent does: so long it waits for a better explanation.
CAUSE_GRACE_S = 1.0


class RanksFailed(Exception):
    """The run failed; `failure` says which rank, and what."""

    def __init__(self, failure: Failure):
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True)
class Report:
    """What a failing rank says before it leaves."""

    rank: int
    message: str
    traceback: str
    is_consequence: bool


@dataclass
class Child:
    """A rank as its parent sees it."""

    rank: int
    process: BaseProcess
    reports: Connection
    report: Report | None = None


def make_report(error: BaseException, rank: Rank) -> Report:
    """What to say about an error that ended a rank."""
    position = rank.heartbeat.position(rank.rank)
    when = f"at step {position.step}" if position.beats else "before the first step"
    text = " ".join(str(error).split())
    return Report(
        rank=rank.rank,
        message=f"rank {rank.rank} failed {when}: {type(error).__name__}: {text}",
        traceback="".join(traceback.format_exception(error)),
        is_consequence=is_consequence(error),
    )


def supervise(children: list[Child], heartbeat: Heartbeat, timeout_s: float) -> None:
    """Return when all ranks are done; raise RanksFailed when one failed or none makes progress."""
    positions = [heartbeat.position(child.rank) for child in children]
    last_progress = time.monotonic()
    while True:
        running = [child for child in children if child.process.exitcode is None]
        if any(child.process.exitcode for child in children) or _collect(children):
            raise RanksFailed(_first_failure(children, heartbeat))
        if not running:
            return
        now = [heartbeat.position(child.rank) for child in children]
        if now != positions:
            positions, last_progress = now, time.monotonic()
        elif time.monotonic() - last_progress > timeout_s:
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
        return Failure(message=own[0].message, traceback=own[0].traceback, rank=own[0].rank)
    for child in killed or silent:
        return Failure(message=_obituary(child, heartbeat), rank=child.rank)
    first = reports[0]
    return Failure(message=first.message, traceback=first.traceback, rank=first.rank)


def _obituary(child: Child, heartbeat: Heartbeat) -> str:
    position, code = heartbeat.position(child.rank), child.process.exitcode or 0
    when = f"at step {position.step}" if position.beats else "before the first step"
    if code < 0:
        return f"rank {child.rank} was killed by {signal.Signals(-code).name} {when}"
    return f"rank {child.rank} left with exit code {code} {when}"


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
    """Whether the process is suspended: SIGSTOP, Ctrl-Z, a debugger."""
    try:
        return psutil.Process(child.process.pid).status() in (
            psutil.STATUS_STOPPED,
            psutil.STATUS_TRACING_STOP,
        )
    except psutil.NoSuchProcess:
        return False


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
