"""Version of this project's source that runs."""

import os
import subprocess
from pathlib import Path

_ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX")
"""What git sets for its hooks: there, every git command speaks of the repository of the hook."""


def git_state() -> tuple[str, bool]:
    """Commit of the source tree that runs, and whether it has changes that are not committed.

    Empty where git does not track this very file in a repository that begins at our root: shardpair may be
    installed somewhere inside another project's repository, whose commit says nothing about us.
    """
    here = Path(__file__).resolve()
    root = here.parents[2]
    environment = {key: value for key, value in os.environ.items() if key not in _ELSEWHERE}

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False, env=environment
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        top = git("rev-parse", "--show-toplevel")
        if not top or Path(top).resolve() != root or not git("ls-files", "--", str(here)):
            return "", False
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except OSError:  # no git on this machine
        return "", False
