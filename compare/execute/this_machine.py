"""This machine, this moment and this source: memory, circumstances, and the commit that runs."""

import datetime
import functools
import platform
import shutil
import subprocess
from pathlib import Path

import psutil

from compare.judge.outcome import Circumstances
from compare.spec.experiment import ExperimentError
from compare.system.facts import cores, cpu_model

CGROUPS = Path("/sys/fs/cgroup")


def here_and_now() -> Circumstances:
    """This machine, this moment, this source."""
    commit, dirty = git_state()
    return Circumstances(
        created_utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        system=f"{platform.system()} {platform.machine()}",
        cpu_model=cpu_model(),
        cores=cores(),
        memory_bytes=memory_bytes(),
        git_commit=commit,
        git_dirty=dirty,
    )


def git_state() -> tuple[str, bool]:
    """Commit of the source tree that runs, and whether it has changes that are not committed.

    Empty where git does not track this very file in a repository that begins at our root: shardpair may be
    installed somewhere inside another project's repository, whose commit says nothing about us.
    """
    here = Path(__file__).resolve()
    inside = here.relative_to(here.parents[2]).as_posix()

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=here.parent, capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        if git("ls-files", "--full-name", "--", str(here)) != inside:
            return "", False
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except OSError:  # no git on this machine
        return "", False


def require_same_source(folder: Path, commit: str, dirty: bool, *, begun: str) -> None:
    """Refuse to go on with what another version of the source began. Raises ExperimentError, with both.

    `commit` and `dirty` are as `git_state` was then; `begun` says what was done with it, such as timed.
    """
    now = git_state()
    if (commit, dirty) != now:
        then, this = (
            (name[:12] or "a version without a commit") + " and changes" * changed
            for name, changed in ((commit, dirty), now)
        )
        raise ExperimentError(
            f"{folder} was {begun} with {then}, and this is {this}: two do not mix; start anew, or go back"
        )


def memory_bytes() -> int:
    """Memory and swap of this machine, or of the container that we are in if that has less."""
    swap, nearest = psutil.swap_memory().total, own_cgroup()
    limits = [psutil.virtual_memory().total + swap]
    for folder in (nearest, *nearest.parents):  # cgroups (version 2), which lie within each other
        limit, swap_limit = _number(folder / "memory.max"), _number(folder / "memory.swap.max")
        if limit is not None:
            limits.append(limit + (swap if swap_limit is None else swap_limit))
    return min(limits)


@functools.cache
def gpu_memories() -> tuple[int, ...]:
    """Memory of each NVIDIA GPU of this machine, whatever a process may use; 0 where it is unknown."""
    if not shutil.which("nvidia-smi"):
        return ()
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(int(line) << 20 if line.strip().isdigit() else 0 for line in listing.splitlines() if line)


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
