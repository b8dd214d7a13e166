"""Memory of this machine: an upper bound."""

import functools
import shutil
import subprocess
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
_MEMORY_FILES = ("memory.max", "memory.limit_in_bytes")  # of cgroups v2 and v1


def memory_bytes() -> int:
    """Memory and swap of this machine, or of the container that we are in if that has less."""
    swap = psutil.swap_memory().total
    return min([psutil.virtual_memory().total + swap, *_cgroup_limits(swap)])


def free_memory_bytes() -> int:
    """Memory that this machine could give to new processes now, without swap."""
    return min(psutil.virtual_memory().available, memory_bytes())


@functools.cache
def gpu_memory_bytes() -> int:
    """Memory of the largest GPU; 0 where nvidia-smi does not say."""
    if not shutil.which("nvidia-smi"):
        return 0
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return max((int(line) << 20 for line in listing.splitlines() if line.strip().isdigit()), default=0)


def _cgroup_limits(machines_swap: int) -> list[int]:
    """Limits of the cgroups above us, swap included where they limit it."""
    limits = []
    for folder in _own_cgroups():
        for name in _MEMORY_FILES:
            limit = _number(folder / name)
            if limit is not None:
                # Where swap is not limited, or not counted, a refusal could be false: take all there is.
                swap = _number(folder / "memory.swap.max")
                limits.append(limit + (machines_swap if swap is None else swap))
    return limits


def _own_cgroups() -> list[Path]:
    """The folders of our cgroup and of all above it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: set[Path] = set()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = CGROUPS / controllers
            own = root / path.lstrip("/")
            folders.update(folder for folder in (own, *own.parents) if folder.is_relative_to(root))
    return sorted(folders)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # there is none, or it says "max"
        return None
