"""Version of this project's source that runs."""

import subprocess
from pathlib import Path

from compare.spec.experiment import ExperimentError


def require_same_source(folder: Path, commit: str, dirty: bool, *, begun: str) -> None:
    """Refuse to go on with what another version of the source began. Raises ExperimentError, with both.

    Args:
        folder: of the run.
        commit, dirty: as `git_state` was then.
        begun: what was done with it, such as timed.
    """
    if (commit, dirty) != (now := git_state()):
        versions = f"with {_named(commit, dirty)}, and this is {_named(*now)}"
        raise ExperimentError(f"{folder} was {begun} {versions}: two do not mix; start anew, or go back")


def _named(commit: str, dirty: bool) -> str:
    return (commit[:12] or "a version without a commit") + (" and changes" if dirty else "")


def git_state() -> tuple[str, bool]:
    """Commit of the source tree that runs, and whether it has changes that are not committed.

    Empty where git does not track this very file in a repository that begins at our root: shardpair may be
    installed somewhere inside another project's repository, whose commit says nothing about us.
    """
    here = Path(__file__).resolve()
    root = here.parents[2]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        top = git("rev-parse", "--show-toplevel")
        if not top or Path(top).resolve() != root or not git("ls-files", "--", str(here)):
            return "", False
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except OSError:  # no git on this machine
        return "", False
