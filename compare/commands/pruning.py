"""What of finished runs can be removed: the ladder's tensors of a run that passed, and what `--continue` set
aside, once the case in its place has finished.

Everything is looked at, and removed, under the lock of its run. Links are never followed.
"""

import contextlib
import re
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from compare.commands.kept_runs import KeptRun, comparisons_in, real_folders, size_of
from compare.contract.record import MANIFEST
from compare.contract.request import REQUEST, Rung
from compare.contract.run_lock import lock_folder
from compare.host.tensors import RecordError
from compare.judge.comparison import Comparison, read_saved, save
from compare.spec.experiment import ExperimentError

_SET_ASIDE = re.compile(r"(?P<case>.+)\.unfinished-\d+")
"""As `studies.paired_run` names it."""

TENSORS = "tensors of the ladder, which passed"


class Removal(Struct, frozen=True, kw_only=True):
    """Files of a run that can go."""

    path: str
    """The folder: of the run whose tensors go, or one that goes as a whole."""
    what: str
    """Why it can, in words."""
    bytes: int
    """That it frees."""


class Pruning(Struct, frozen=True, kw_only=True):
    """What can be removed from some runs."""

    removals: list[Removal]
    left_alone: dict[str, str]
    """Runs in use, or whose record cannot be read: why, by folder."""

    @property
    def bytes(self) -> int:
        """That it frees, all in all."""
        return sum(removal.bytes for removal in self.removals)


def removable(runs: list[KeptRun]) -> Pruning:
    """What can be removed from these runs; nothing is.

    Args:
        runs: of any command; only comparisons have something to remove.
    """
    removals, left_alone = [], {}
    for folder in (path for run in runs for path in comparisons_in(Path(run.folder))):
        try:
            with _locked(folder):
                removals += _in_comparison(folder)
        except (ExperimentError, RecordError) as error:
            left_alone[str(folder)] = str(error)
    return Pruning(removals=removals, left_alone=left_alone)


@contextlib.contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Hold a run, and its cases, in which a side may be at work that somebody started by itself.

    Raises:
        FolderInUse: one of them is held.
    """
    with contextlib.ExitStack() as locks:
        for path in (folder, *real_folders(folder)):
            locks.enter_context(lock_folder(path))
        yield


def remove(pruning: Pruning) -> None:
    """Remove what was found.

    Raises:
        FolderInUse: a run has begun there since.
        OSError: a file may not be removed.
    """
    for removal in pruning.removals:
        path = Path(removal.path)
        if removal.what == TENSORS:
            remove_tensors(path)
            continue
        with _locked(path.parent):
            shutil.rmtree(path)  # of a link it removes nothing, and says so


def remove_tensors(folder: Path) -> Comparison:
    """Remove the ladder's tensors of a comparison that passed, and note it; those of another one stay.

    Returns:
        The comparison as it is saved now.

    Raises:
        FolderInUse: a run is at work there.
        RecordError: it is no comparison, or a garbled one.
    """
    with _locked(folder):
        saved = read_saved(folder)
        files = _tensors(folder, saved)
        if files:
            saved = msgspec.structs.replace(saved, tensors_removed=True)
            save(saved, folder)  # first: a run without tensors that does not say why would fail
            for file in files:
                file.unlink()
    return saved


def _tensors(folder: Path, saved: Comparison) -> list[Path]:
    """Files of the ladder of every case, if all passed; no link, and none behind one."""
    if not saved.verdicts or not saved.passed:
        return []
    cases = [folder / name for name in saved.cases if not (folder / name).is_symlink()]
    files = [case / f"{rung}.safetensors" for case in cases for rung in Rung]
    return [file for file in files if file.is_file() and not file.is_symlink()]


def _in_comparison(folder: Path) -> Iterator[Removal]:
    saved = read_saved(folder)
    if files := _tensors(folder, saved):
        yield Removal(path=str(folder), what=TENSORS, bytes=sum(map(size_of, files)))
    for path in real_folders(folder):
        if _is_superseded(path, saved):
            yield Removal(path=str(path), what="set aside, and run again since", bytes=size_of(path))


def _is_superseded(path: Path, saved: Comparison) -> bool:
    """Whether it is what an unfinished case left, and the case has finished since."""
    name = _SET_ASIDE.fullmatch(path.name)
    if not name or name["case"] not in saved.requests or not (path / REQUEST).is_file():
        return False
    return (path.with_name(name["case"]) / MANIFEST).is_file()
