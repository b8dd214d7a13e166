"""Memory of this machine: an upper bound."""

import functools
import shutil
import subprocess
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")


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
    """Limits of our cgroup (version 2) and of those above it, swap included where they limit it."""
    limits, nearest = [], own_cgroup()
    for folder in (nearest, *nearest.parents):
        limit, swap = _number(folder / "memory.max"), _number(folder / "memory.swap.max")
        if limit is not None:
            # Where swap is not limited, a refusal could be false: take all there is.
            limits.append(limit + (machines_swap if swap is None else swap))
    return limits


def own_cgroup() -> Path:
    """The folder of the cgroup that we are in."""
    membership = Path("/proc/self/cgroup")
    lines = membership.read_text().splitlines() if membership.is_file() else []
    return CGROUPS / next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # there is none, or it says "max"
        return None
