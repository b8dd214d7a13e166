"""Circumstances of a run: this machine, its memory, the time, and the commit of the source."""

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


def here_and_now() -> Circumstances:
    """The circumstances of a run that starts now."""
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
    """The commit of shardpair's source tree, and True if it has uncommitted changes.

    ('', False) if git does not track this file in a repository whose root is ours: an installed shardpair may
    lie inside another project's repository.
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
    """Reject a run that another version of the source began. Raises ExperimentError with both versions.

    `commit` and `dirty` are from `git_state` at its start; `begun` is a participle, such as timed.
    """
    now = git_state()
    if (commit, dirty) != now:
        then, this = (
            (name[:12] or "a version without a commit") + " and changes" * changed
            for name, changed in ((commit, dirty), now)
        )
        raise ExperimentError(
            f"{folder} was {begun} with {then}, and this is {this}: start a new run, or use that version"
        )


def memory_bytes() -> int:
    """Memory and swap of this machine, in bytes."""
    return psutil.virtual_memory().total + psutil.swap_memory().total


@functools.cache
def gpu_memories() -> tuple[int, ...]:
    """Bytes of memory of each NVIDIA GPU of this machine, also of GPUs hidden from a process; 0 if
    unknown."""
    if not shutil.which("nvidia-smi"):
        return ()
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(int(line) << 20 if line.strip().isdigit() else 0 for line in listing.splitlines() if line)
