"""Facts of this machine and of processes: processors, memory, versions, CPU time."""

import contextlib
import importlib.metadata
import os
import platform
import resource
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

BUSY_SHARE = 0.05
"""Share of one core. A waiting process polls with 1 %; a computing one gets more than this even on a machine
with ten times as many busy processes as cores."""
LOOK_S = 1.0


class MissingDevicesError(RuntimeError):
    """A layout needs more devices than this machine has. The message is one line with both numbers."""


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model with family and number, or else its architecture.

    Virtual machines report "AMD EPYC" for processors whose speeds differ by a factor of two.
    """
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    core = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = core.get("model name") or platform.processor() or platform.machine()
    if not {"cpu family", "model"} <= set(core):
        return name
    return f"{name} (family {core['cpu family']}, model {core['model']})"


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_seconds() -> float:
    """User and system CPU seconds of this process and of its children that ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def process_memory() -> int:
    """Bytes of RAM of this process."""
    return psutil.Process().memory_info().rss


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of Python and of packages."""
    return {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in packages
    }


def look_s(timeout_s: float) -> float:
    """Seconds between two looks at a process that may hang for `timeout_s`."""
    return min(LOOK_S, timeout_s / 4)


def is_stopped(pid: int) -> bool:
    """True if a process is suspended, by SIGSTOP or a debugger. Its children may run."""
    return _status(pid) in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def has_ended(pid: int) -> bool:
    """True if a process has ended, also if its parent has not waited for it."""
    return _status(pid) in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def _status(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD


class Activity:
    """CPU use of a process (by default this one) and its children between two looks; a hang uses none."""

    def __init__(self, pid: int | None = None):
        self._pid = pid
        self._used, self._at = self._cpu_seconds(), time.monotonic()

    def _cpu_seconds(self) -> float:
        """CPU seconds of the running processes, and of their children that ended."""
        total = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._pid)
            for member in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = member.cpu_times()
                    total += times.user + times.system + times.children_user + times.children_system
        return total

    def is_busy(self) -> bool:
        """True if more than `BUSY_SHARE` of a core was used since the last call."""
        used, now = self._cpu_seconds(), time.monotonic()
        share = (used - self._used) / max(now - self._at, 1e-9)
        self._used, self._at = used, now
        return share > BUSY_SHARE
