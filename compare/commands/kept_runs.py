"""The runs in a folder: what each was, its layout, verdict, age and size."""

import datetime
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct, to_builtins

from compare.host.json_files import read_result
from compare.host.tensors import RecordError
from compare.judge.comparison import COMPARISON, read_saved
from compare.judge.outcome import OUTCOME
from compare.spec.sections import Layout
from compare.studies.golden import OUTCOME as GOLDEN
from compare.studies.golden import Held
from compare.studies.registry import read_study

OTHERS = {GOLDEN: "golden"}
"""The file that each of the other commands leaves, and its word."""
_VERDICTS: dict[str, Callable[[Path], str]] = {
    GOLDEN: lambda folder: read_result(folder / GOLDEN, Held, command="golden").sentence(),
}
MATRIX = "matrix"
"""The command that leaves a folder of comparisons and no file of its own beside them."""


class KeptRun(Struct, frozen=True, kw_only=True):
    """A folder with results."""

    folder: str
    command: str
    experiment: str
    layout: str
    """The settings that are not the default: "dp_shard=2 zero=3"; "" of a study of several layouts."""
    verdict: str
    """As it was saved, in one line; of a bench, buckets or collectives the command that prints it."""
    created_utc: str
    """When it began; of other studies than comparisons when their file was written."""
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
    found = [_read(folder), *(_read(path) or _matrix(path) for path in real_folders(folder))]
    return sorted((run for run in found if run), key=lambda run: run.created_utc)


def real_folders(folder: Path) -> list[Path]:
    """The folders in a folder that can be read and are no links, by name."""
    inside = (path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted(path for path in inside if os.access(path, os.R_OK | os.X_OK))


def comparisons_in(folder: Path) -> list[Path]:
    """The folders of comparisons of one run: its own, or those of its parts (of a matrix or a sweep)."""
    return [path for path in (folder, *real_folders(folder)) if (path / COMPARISON).is_file()]


def _read(folder: Path) -> KeptRun | None:
    if (folder / COMPARISON).is_file():
        return _comparison(folder)
    if (folder / OUTCOME).is_file():
        return _study(folder)
    file = next((file for file in OTHERS if (folder / file).is_file()), "")
    if not file:
        return None
    written = datetime.datetime.fromtimestamp((folder / file).stat().st_mtime, datetime.UTC)
    verdict = _VERDICTS.get(file, "shardpair report {}".format)
    return _line(
        folder,
        OTHERS[file],
        created_utc=written.isoformat(timespec="seconds"),
        verdict=_said(lambda: verdict(folder)),
    )


def _comparison(folder: Path) -> KeptRun:
    try:
        saved = read_saved(folder)
    except RecordError as error:
        return _line(folder, "run", verdict=str(error))
    of_cases = {request.experiment.layout for request in saved.requests.values()}
    layouts = of_cases or {saved.experiment.layout}
    return _line(
        folder,
        saved.command,
        experiment=saved.name,
        layout=in_settings(layouts.pop()) if len(layouts) == 1 else "",
        created_utc=saved.created_utc,
        verdict=_said(saved.sentence),
    )


def _matrix(folder: Path) -> KeptRun | None:
    """A matrix: comparisons side by side, each with layouts of its own."""
    parts = [run for path in comparisons_in(folder) if (run := _comparison(path)).command == MATRIX]
    if not parts:
        return None
    good = sum(run.verdict.startswith("PASS") for run in parts)
    created = min(run.created_utc for run in parts)
    return _line(folder, MATRIX, created_utc=created, verdict=f"{good} of {len(parts)} studies pass")


def _said(verdict: Callable[[], str]) -> str:
    """A verdict; of figures that no run leaves the reason why there is none."""
    try:
        return verdict()
    except RecordError as error:
        return str(error)
    except (LookupError, ValueError, ArithmeticError) as error:
        return f"cannot be judged ({type(error).__name__}: {error}): it was changed"


def _study(folder: Path) -> KeptRun:
    """A study, whose outcome says which one it is."""
    try:
        _, outcome = read_study(folder)
    except RecordError as error:
        return _line(folder, "study", verdict=str(error))
    return _line(
        folder,
        outcome.study,
        experiment=outcome.name,
        created_utc=outcome.circumstances.created_utc,
        verdict=outcome.sentence() or f"{outcome.progress}; shardpair report {folder}",
    )


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
