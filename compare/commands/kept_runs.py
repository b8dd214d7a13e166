"""The runs in a folder: what each was, its layout, verdict, age and size."""

import contextlib
import datetime
import os
from collections.abc import Generator, Iterator
from pathlib import Path

from msgspec import Struct, to_builtins

from compare.contract.run_lock import lock_folder
from compare.host.tensors import RecordError
from compare.judge.outcome import OUTCOME, Outcome
from compare.spec.sections import Layout
from compare.studies.registry import read_study


class KeptRun(Struct, frozen=True, kw_only=True):
    """A folder with results."""

    folder: str
    command: str
    experiment: str
    layout: str
    """The settings that are not the default: "dp_shard=2 zero=3"; "" of a study of several layouts."""
    verdict: str
    """As it was saved, in one line; of a bench or buckets the command that prints it."""
    created_utc: str
    """When it began."""
    bytes: int
    """Of all its files."""

    @property
    def age(self) -> datetime.timedelta | None:
        """Time since it began; None if its record does not say when."""
        try:
            created = datetime.datetime.fromisoformat(self.created_utc)
        except ValueError:
            return None
        return datetime.datetime.now(datetime.UTC) - created.replace(tzinfo=created.tzinfo or datetime.UTC)


def kept_runs(folder: Path) -> list[KeptRun]:
    """The runs in a folder of them, or in itself, the oldest first; a garbled one says so."""
    places = (path for path in (folder, *real_folders(folder)) if (path / OUTCOME).is_file())
    return sorted(map(_study, places), key=lambda run: run.created_utc)


def real_folders(folder: Path) -> list[Path]:
    """The folders in a folder that can be read and are no links, by name."""
    inside = (path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted(path for path in inside if os.access(path, os.R_OK | os.X_OK))


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


def _study(folder: Path) -> KeptRun:
    """What a study left, which says itself which one it is."""
    try:
        outcome = read_study(folder)[1]
    except RecordError as error:
        return _line(folder, "study", verdict=str(error))
    layouts = {case.experiment.layout for case in outcome.cases.values()} or {outcome.experiment.layout}
    return _line(
        folder,
        outcome.study,
        experiment=outcome.name,
        layout=in_settings(layouts.pop()) if len(layouts) == 1 else "",
        created_utc=outcome.circumstances.created_utc,
        verdict=_said(outcome, folder),
    )


def _said(outcome: Outcome, folder: Path) -> str:
    """The verdict; of a study without one the command that shows it."""
    if outcome.verdicts or outcome.study == "run":
        return outcome.sentence()
    return f"{outcome.progress}; shardpair report {folder}"


def in_settings(layout: Layout) -> str:
    """The fields of a layout that are not the default, as they are written; "one device" if all are."""
    default = to_builtins(Layout())
    changed = [f"{name}={value}" for name, value in to_builtins(layout).items() if value != default[name]]
    return " ".join(changed) or "one device"


def _line(folder: Path, command: str, **fields: str) -> KeptRun:
    empty = {"experiment": "", "layout": "", "created_utc": ""}
    return KeptRun(folder=str(folder), command=command, bytes=size_of(folder), **empty | fields)


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; what a link leads to is not counted."""
    return os.lstat(path).st_size if path.is_symlink() or not path.is_dir() else sum(_sizes(path))


def _sizes(folder: Path) -> Iterator[int]:
    for where, _, names in os.walk(folder):
        yield from (os.lstat(os.path.join(where, name)).st_size for name in names)
