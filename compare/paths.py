"""Where results and caches go."""

import datetime
import os
from pathlib import Path


def default_cache() -> str:
    """The user's cache folder: $XDG_CACHE_HOME/shardpair, or ~/.cache/shardpair."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(base) / "shardpair")


def new_run_dir(name: str, run_dir: str = "") -> Path:
    """The folder for a new run: the one asked for, or runs/NAME-TIME, numbered if it is taken."""
    if run_dir:
        return Path(run_dir)
    stem = f"{Path(name).stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    candidates = (Path("runs") / (stem + (f"-{number}" if number else "")) for number in range(1000))
    return next(path for path in candidates if not path.exists())
