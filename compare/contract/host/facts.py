"""Facts of this machine and this process that every side puts on the record."""

import importlib.metadata
import os
import platform
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class MissingDevicesError(RuntimeError):
    """This machine lacks the devices that a layout needs. The message is one line with both numbers."""


class MissingPackageError(RuntimeError):
    """This Python lacks a package that an engine needs. The message is one line: the package, what to do."""


def cpu_model() -> str:
    """The processor's model name, or its architecture where the system does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_seconds() -> float:
    """User and system CPU seconds of this process, and of children that it waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class MemoryUse(NamedTuple):
    """Bytes in use now, and the most so far."""

    now: int
    peak: int


def process_memory() -> MemoryUse:
    """What this process has in RAM; where the system tells only of the most, that twice."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    pages = Path("/proc/self/statm")
    now = int(pages.read_text().split()[1]) * resource.getpagesize() if pages.is_file() else peak
    return MemoryUse(now=now, peak=max(now, peak))


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Python's and some packages' versions."""
    return {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in packages
    }
