"""Folders of runs and caches, and output files of flags."""

import contextlib
import datetime
import itertools
import os
import shutil
from pathlib import Path

from compare.spec.experiment import ExperimentError

RUNS = Path("runs")
"""The default folder of runs."""
PICTURES = (".png", ".svg", ".pdf")


def check_output(flag: str, path: Path | None, *, kinds: tuple[str, ...] = ()) -> None:
    """Reject an output file that cannot be written, before the work. Raises ExperimentError.

    `kinds` are the allowed suffixes; () allows any.
    """
    if path is None:
        return
    if kinds and path.suffix not in kinds:
        raise ExperimentError(f"{flag} {path}: end it in one of {', '.join(kinds)}")
    if path.exists() and not path.is_file():  # a device would be replaced by a file
        raise ExperimentError(f"{flag} {path}: this is not a file: give the name of a file")
    probe = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ExperimentError(
            f"{flag} {path}: cannot be written ({error.strerror}): give another file"
        ) from None


def default_cache() -> str:
    """The user's cache folder, $XDG_CACHE_HOME/shardpair or ~/.cache/shardpair; '' if it cannot be
    created."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    except RuntimeError:  # a container's user without a name
        return ""
    folder = Path(base).absolute() / "shardpair"
    return str(folder) if can_be_folder(folder) else ""


def can_be_folder(folder: Path) -> bool:
    """True for a folder that can be written, or created."""
    folder = folder.absolute()
    nearest = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    return os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK)


def remove_run_dir(folder: Path) -> None:
    """Remove the folder of a run without results, and `runs` if it is empty then."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.parent == RUNS:
        with contextlib.suppress(OSError):  # other runs
            RUNS.rmdir()


def create_run_dir(name: str, run_dir: str = "") -> Path:
    """Create the folder of a new run: `run_dir`, or runs/NAME-TIME, with a number if it exists.

    Raises ExperimentError: `run_dir` exists, no folder can be created, or its path is not UTF-8, which
    records are.
    """
    if (path := str(Path(run_dir).absolute())) != path.encode(errors="replace").decode():
        raise ExperimentError(f"{path}: this path is not UTF-8: give another folder, or --run_dir")
    stem = f"{Path(name).stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    numbered = (RUNS / f"{stem}-{number}" for number in itertools.count(2))
    for folder in [Path(run_dir)] if run_dir else itertools.chain([RUNS / stem], numbered):
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise ExperimentError(
                f"{folder} cannot be created ({error.strerror}): give a --run_dir that can be written"
            ) from None
    raise ExperimentError(f"{run_dir} exists already: give another --run_dir, or remove it")
