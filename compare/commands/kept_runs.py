"""`shardpair list --runs FOLDER`: a line for each run there: layout, verdict, size."""

import os
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct, to_builtins

from compare.host.tensors import RecordError
from compare.judge.comparison import COMPARISON, read_saved
from compare.judge.outcome import OUTCOME, read_outcome
from compare.spec.sections import Layout
from compare.studies.collectives import RESULT as COLLECTIVES
from compare.studies.golden import OUTCOME as GOLDEN
from compare.studies.sweep_outcome import SWEEP

OTHERS = {SWEEP: "sweep", COLLECTIVES: "collectives", GOLDEN: "golden"}
"""The file that each of the other commands leaves."""
MB = 1e6


class KeptRun(Struct, frozen=True, kw_only=True):
    """A folder with results."""

    folder: str
    command: str
    experiment: str
    layout: str
    """The settings that are not the default: "dp_shard=2 zero=3"; "" of a study of several layouts."""
    created_utc: str
    megabytes: int
    """Of all its files, in 10^6 bytes, rounded up."""
    verdict: str
    """As it was saved, in one line; of other studies where to read it."""


def kept_runs(folder: Path) -> list[KeptRun]:
    """The runs in a folder of them, or in itself, the oldest first; a garbled one says so."""
    inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    found = [run for path in (folder, *inside) if (run := _read(path))]
    return sorted(found, key=lambda run: run.created_utc)


def _read(folder: Path) -> KeptRun | None:
    if (folder / COMPARISON).is_file():
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
            verdict=saved.sentence(),
        )
    if (folder / OUTCOME).is_file():
        return _study(folder)
    command = next((command for file, command in OTHERS.items() if (folder / file).is_file()), "")
    return _line(folder, command, verdict=f"shardpair report {folder}") if command else None


def _study(folder: Path) -> KeptRun:
    """A study that runs in rounds, which says itself which one it is."""
    try:
        outcome = read_outcome(folder)
    except RecordError as error:
        return _line(folder, "study", verdict=str(error))
    return _line(
        folder,
        outcome.study,
        experiment=outcome.name,
        created_utc=outcome.circumstances.created_utc,
        verdict=f"{outcome.finished_rounds} of {outcome.rounds} rounds; shardpair report {folder}",
    )


def in_settings(layout: Layout) -> str:
    """The fields of a layout that are not the default, as they are written; "one device" if all are."""
    default = to_builtins(Layout())
    changed = [f"{name}={value}" for name, value in to_builtins(layout).items() if value != default[name]]
    return " ".join(changed) or "one device"


def _line(folder: Path, command: str, **fields: str) -> KeptRun:
    empty = {"experiment": "", "layout": "", "created_utc": ""}
    size = -int(-sum(_sizes(folder)) // MB)
    return KeptRun(folder=str(folder), command=command, megabytes=size, **empty | fields)


def _sizes(folder: Path) -> Iterator[int]:
    for where, _, names in os.walk(folder):
        yield from (os.lstat(os.path.join(where, name)).st_size for name in names)
