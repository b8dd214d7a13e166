"""Folders of results and caches."""

import contextlib
import datetime
import itertools
import os
import shutil
from pathlib import Path

from compare.host.disk import why_not_readable
from compare.spec.experiment import ExperimentError

RUNS = Path("runs")
"""Default folder of runs."""
PICTURES = (".png", ".svg", ".pdf")
NAME_BYTES = 255  # of a file or folder, on every file system in use


def check_output(flag: str, path: Path | None, *, kinds: tuple[str, ...] = ()) -> None:
    """Refuse a file that cannot be written, before the work that makes it.

    Args:
        flag: that asked for it.
        path: the file; None if none was asked for.
        kinds: what its name may end in; anything, if there are none.

    Raises:
        ExperimentError: another kind, no such folder, one that cannot be written to, or something there
            that is not a file: a device would be replaced by one.
    """
    if path is None:
        return
    if kinds and path.suffix not in kinds:
        raise ExperimentError(f"{flag} {path}: end it in one of {', '.join(kinds)}")
    if not os.path.isdir(path.parent):  # unlike Path.is_dir, False for a name that is too long
        raise ExperimentError(f"{flag} {path}: there is no folder {path.parent}")
    there = why_not_readable(path)
    if there.endswith("not a file"):
        raise ExperimentError(f"{flag} {path}: this {there}: give the name of a file")
    probe = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # it is written under such a name first
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ExperimentError(f"{flag} {path}: cannot be written ({error.strerror})") from None


def is_utf8(text: str) -> bool:
    """True if text from the operating system can be written as UTF-8, which JSON is."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def default_cache() -> str:
    """The user's cache folder: $XDG_CACHE_HOME/shardpair, or ~/.cache/shardpair; '' if there is no home."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    except RuntimeError:  # a container's user without a name
        return ""
    return str(Path(base) / "shardpair")


def check_python(flag: str, python: str) -> None:
    """Raise ExperimentError, naming the flag, if the interpreter does not exist."""
    if not shutil.which(python):
        raise ExperimentError(f"{flag} {python}: no such program; give the path of a Python")


def can_be_folder(folder: Path) -> bool:
    """True if it is a folder to write to, or can be made."""
    folder = folder.absolute()
    nearest = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    too_long = any(len(os.fsencode(part)) > NAME_BYTES for part in folder.parts)
    return not too_long and os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK)


def check_cache(cache_dir: str) -> None:
    """Refuse a folder for compiled programs that can neither be written nor made; '' is none.

    Raises:
        ExperimentError: JAX would go on without it, and compile anew in every run.
    """
    if not cache_dir:
        return
    if not can_be_folder(Path(cache_dir)):
        raise ExperimentError(
            f"--cache_dir {cache_dir} cannot be written: give a folder that can, or --cache_dir '' to keep "
            f"no compiled programs"
        )


def remove_run_dir(folder: Path) -> None:
    """Remove a run's folder that holds nothing of worth, and `runs` with it if nothing else is in there."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.parent == RUNS:
        with contextlib.suppress(OSError):  # it is not empty
            RUNS.rmdir()


def create_run_dir(name: str, run_dir: str = "") -> Path:
    """Create the folder of a new run: the one asked for, or runs/NAME-TIME, numbered if that is taken.

    Raises:
        ExperimentError: the folder that was asked for exists, or none can be created.
    """
    stem = f"{Path(name).stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    numbered = (RUNS / f"{stem}-{number}" for number in itertools.count(2))
    if not is_utf8(here := os.getcwd()):
        raise ExperimentError(f"the current folder {here} has a name that is not UTF-8: records hold text")
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
