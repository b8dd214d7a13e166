"""What of finished runs can be removed: the ladder's tensors of a run that passed, and what `--continue` set
aside, once the case in its place has finished.

Everything is looked at, and removed, under the lock of its run. Links are never followed.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from compare.commands.kept_runs import KeptRun, locked, real_folders, size_of
from compare.contract.record import MANIFEST
from compare.contract.request import REQUEST
from compare.host.tensors import RecordError
from compare.judge.outcome import Outcome, read_outcome, save
from compare.spec.experiment import ExperimentError
from compare.studies.run import tensors_of

_SET_ASIDE = re.compile(r"(?P<case>.+)\.unfinished-\d+")
"""As `study` names it."""

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
    for folder in (Path(run.folder) for run in runs):
        try:
            with locked(folder):
                removals += _in_run(folder)
        except (ExperimentError, RecordError) as error:
            left_alone[str(folder)] = str(error)
    return Pruning(removals=removals, left_alone=left_alone)


def remove(pruning: Pruning) -> None:
    """Remove what was found.

    Raises:
        FolderInUse: a run has begun there since.
        OSError: a file may not be removed.
    """
    for removal in pruning.removals:
        path = Path(removal.path)
        if removal.what == TENSORS:
            with locked(path):
                saved = read_outcome(path)
                files = tensors_of(path, saved)
                save(replace(saved, tensors_removed=True), path)
                for file in files:
                    file.unlink()
            continue
        with locked(path.parent):
            shutil.rmtree(path)  # of a link it removes nothing, and says so


def _in_run(folder: Path) -> Iterator[Removal]:
    saved = read_outcome(folder)
    if files := tensors_of(folder, saved):
        yield Removal(path=str(folder), what=TENSORS, bytes=sum(map(size_of, files)))
    for path in real_folders(folder):
        if _is_superseded(path, saved):
            yield Removal(path=str(path), what="set aside, and run again since", bytes=size_of(path))


def _is_superseded(path: Path, saved: Outcome) -> bool:
    """Whether it is what an unfinished case left, and the case has finished since."""
    name = _SET_ASIDE.fullmatch(path.name)
    if not name or name["case"] not in saved.cases or not (path / REQUEST).is_file():
        return False
    return (path.with_name(name["case"]) / MANIFEST).is_file()
