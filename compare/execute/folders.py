"""Folders of results and caches, and files that a flag asks for."""

import contextlib
import datetime
import itertools
import os
import shutil
from pathlib import Path

from compare.spec.experiment import ExperimentError

RUNS = Path("runs")
"""Default folder of runs."""
PICTURES = (".png", ".svg", ".pdf")


def check_output(flag: str, path: Path | None, *, kinds: tuple[str, ...] = ()) -> None:
    """Refuse a file that cannot be written, before the work that makes it. Raises ExperimentError.

    `kinds` are the suffixes that it may have; none allow any.
    """
    if path is None:
        return
    if kinds and path.suffix not in kinds:
        raise ExperimentError(f"{flag} {path}: end it in one of {', '.join(kinds)}")
    if os.path.exists(path) and not os.path.isfile(path):  # a device would be replaced by a file
        raise ExperimentError(f"{flag} {path}: this is not a file: give the name of a file")
    probe = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # it is written under such a name first
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ExperimentError(f"{flag} {path}: cannot be written ({error.strerror})") from None


def default_cache() -> str:
    """The user's cache folder, $XDG_CACHE_HOME/shardpair or ~/.cache/shardpair; '' where none can be."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    except RuntimeError:  # a container's user without a name
        return ""
    folder = Path(base).absolute() / "shardpair"
    nearest = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    can_be_made = os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK)
    return str(folder) if can_be_made else ""


def remove_run_dir(folder: Path) -> None:
    """Remove a run's folder that holds nothing of worth, and `runs` with it if nothing else is in there."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.parent == RUNS:
        with contextlib.suppress(OSError):  # it is not empty
            RUNS.rmdir()


def create_run_dir(name: str, run_dir: str = "") -> Path:
    """Create the folder of a new run: the one asked for, or runs/NAME-TIME, numbered if that is taken.

    Raises ExperimentError: the folder that was asked for exists, or none can be created.
    """
    stem = f"{Path(name).stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    numbered = (RUNS / f"{stem}-{number}" for number in itertools.count(2))
    for folder in [Path(run_dir)] if run_dir else itertools.chain([RUNS / stem], numbered):
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
