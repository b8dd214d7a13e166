"""The runs in a folder: what each was, its layout, verdict, age and size."""

import datetime
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct, to_builtins

from compare.host.tensors import RecordError
from compare.judge.comparison import COMPARISON, Comparison
from compare.judge.outcome import OUTCOME
from compare.spec.sections import Layout
from compare.studies.ladder_tensors import real_folders
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


def comparisons_in(folder: Path) -> list[Path]:
    """The folders of comparisons of one run: its own, or those of its parts (of a matrix or a sweep)."""
    return [path for path in (folder, *real_folders(folder)) if (path / COMPARISON).is_file()]


def _study(folder: Path) -> KeptRun:
    """What a study left, which says itself which one it is."""
    try:
        outcome = read_study(folder)[1]
    except RecordError as error:
        return _line(folder, "study", verdict=str(error))
    layouts = set()
    if isinstance(outcome, Comparison):
        layouts = {request.experiment.layout for request in outcome.requests.values()}
        layouts = layouts or {outcome.experiment.layout}
    return _line(
        folder,
        outcome.study,
        experiment=outcome.name,
        layout=in_settings(layouts.pop()) if len(layouts) == 1 else "",
        created_utc=outcome.circumstances.created_utc,
        verdict=_said(lambda: outcome.sentence() or f"{outcome.progress}; shardpair report {folder}"),
    )


def _said(verdict: Callable[[], str]) -> str:
    """A verdict; of figures that no run leaves the reason why there is none."""
    try:
        return verdict()
    except RecordError as error:
        return str(error)
    except (LookupError, ValueError, ArithmeticError) as error:
        return f"cannot be judged ({type(error).__name__}: {error}): it was changed"


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
