"""The ladder's tensors of a comparison, and their removal once all cases have passed; no link is followed."""

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

import msgspec

from compare.contract.request import Rung
from compare.contract.run_lock import lock_folder
from compare.judge.comparison import Comparison, read_saved
from compare.judge.outcome import save


def remove_tensors(folder: Path) -> Comparison:
    """Remove the ladder's tensors of a comparison that passed, and note it; those of another one stay.

    Returns:
        The comparison as it is saved now.

    Raises:
        FolderInUse: a run is at work there.
        RecordError: it is no comparison, or a garbled one.
    """
    with locked(folder):
        saved = read_saved(folder)
        files = tensors_of(folder, saved)
        if files:
            saved = msgspec.structs.replace(saved, tensors_removed=True)
            save(saved, folder)  # first: a run without tensors that does not say why would fail
            for file in files:
                file.unlink()
    return saved


def tensors_of(folder: Path, saved: Comparison) -> list[Path]:
    """Files of the ladder of every case, if all passed; no link, and none behind one."""
    if not saved.verdicts or not saved.passed:
        return []
    cases = [folder / name for name in saved.cases if not (folder / name).is_symlink()]
    files = [case / f"{rung}.safetensors" for case in cases for rung in Rung]
    return [file for file in files if file.is_file() and not file.is_symlink()]


@contextlib.contextmanager
def locked(folder: Path) -> Generator[None]:
    """Hold a run, and its cases, in which a side may be at work that somebody started by itself.

    Raises:
        FolderInUse: one of them is held.
    """
    with contextlib.ExitStack() as locks:
        for path in (folder, *real_folders(folder)):
            locks.enter_context(lock_folder(path))
        yield


def real_folders(folder: Path) -> list[Path]:
    """The folders in a folder that can be read and are no links, by name."""
    inside = (path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted(path for path in inside if os.access(path, os.R_OK | os.X_OK))
