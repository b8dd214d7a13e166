"""Where results and caches go."""

import datetime
import itertools
import os
from pathlib import Path

from compare.contract.experiment import ExperimentError

PICTURES = (".png", ".svg", ".pdf")


def check_output(flag: str, path: Path | None, *, kinds: tuple[str, ...] = ()) -> None:
    """Refuse a file that cannot be written, before the work that makes it.

    Args:
        flag: that asked for it.
        path: the file; None if nobody asked.
        kinds: what its name may end in; anything, if there are none.

    Raises:
        ExperimentError: another kind, or no such folder.
    """
    if path and kinds and path.suffix not in kinds:
        raise ExperimentError(f"{flag} {path}: end it in one of {', '.join(kinds)}")
    if path and not path.parent.is_dir():
        raise ExperimentError(f"{flag} {path}: there is no folder {path.parent}")


def default_cache() -> str:
    """The user's cache folder: $XDG_CACHE_HOME/shardpair, or ~/.cache/shardpair."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(base) / "shardpair")


def create_run_dir(name: str, run_dir: str = "") -> Path:
    """Create the folder of a new run: the one asked for, or runs/NAME-TIME, numbered if that is taken.

    Raises:
        ExperimentError: the folder that was asked for exists, or none can be created.
    """
    stem = f"{Path(name).stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    numbered = (Path("runs", f"{stem}-{number}") for number in itertools.count(2))
    for folder in [Path(run_dir)] if run_dir else itertools.chain([Path("runs", stem)], numbered):
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue  # another run of this second took it, between any look and this attempt
        except OSError as error:
            raise ExperimentError(
                f"{folder} cannot be created ({error.strerror}): give a --run_dir that can be written"
            ) from None
    raise ExperimentError(f"{run_dir} exists already: give another --run_dir, or remove it")
