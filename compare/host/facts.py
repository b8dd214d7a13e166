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


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model, or its architecture where the system does not tell.

    With family and number, where there are any: in a virtual machine processors that differ by a factor of
    two in their products may all be called "AMD EPYC".
    """
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    first_core = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))
    }
    name = first_core.get("model name") or platform.processor() or platform.machine()
    if not {"cpu family", "model"} <= set(first_core):
        return name
    return f"{name} (family {first_core['cpu family']}, model {first_core['model']})"


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
    """RAM of this process: now and at its peak; the peak twice where the system tells only that."""
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
