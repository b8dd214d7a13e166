"""`shardpair runs`: what was run here, a line each; with --prune, what of it can be removed."""

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import Annotated

import tyro
from msgspec import Struct, to_builtins
from msgspec.structs import replace

from compare.contract.record import MANIFEST
from compare.contract.request import REQUEST
from compare.contract.run_lock import lock_folder
from compare.execute.paths import RUNS
from compare.host.tensors import RecordError
from compare.judge.outcome import OUTCOME, read_outcome, save
from compare.show.findings import Column, table_of
from compare.show.terminal import terminal_table
from compare.spec.experiment import ExperimentError, Layout
from compare.studies.registry import read_study
from compare.studies.run import tensors_of
from compare.terminal import errors_console, human_bytes, print_json, results_console

_SET_ASIDE = re.compile(r"(?P<case>.+)\.unfinished-\d+")
"""As `study` names what an unfinished case left."""


class SavedRun(Struct, frozen=True, kw_only=True):
    """A folder with results."""

    folder: str
    command: str = ""
    experiment: str = ""
    layout: str = ""
    """The settings that are not the default: "dp_shard=2 zero=3"; "" of a study of several layouts."""
    verdict: str
    """In one line; of a study without one the command that shows it."""
    created_utc: str = ""
    bytes: int
    """Of all its files; what a link leads to is not counted."""


class Removal(Struct, frozen=True, kw_only=True):
    """Files of a run that can go."""

    folder: str
    why: str
    files: list[str]
    """Of the ladder, or a folder that was set aside."""
    bytes: int


class Runs(Struct, frozen=True, kw_only=True):
    """Show what was run here, a line each: layout, verdict, begin and size; --prune frees room.

    --prune removes the ladder's tensors (gradients, weights, moments) of runs that passed, whose verdicts
    stay; and what `--continue` set aside of cases that have finished since, with their checkpoints. Nothing
    else is removed, and no run that is in use is touched.

    Try:
      shardpair runs
      shardpair runs --prune         (says what would go)
      shardpair runs --prune --yes
    """

    folder: Annotated[Path, tyro.conf.Positional] = RUNS
    """A folder of runs, or of one run."""
    prune: bool = False
    """Say what can be removed, and how much that frees; removes it with --yes."""
    yes: bool = False
    """With --prune: remove it."""
    json: bool = False
    """Print one JSON object on stdout instead of tables."""

    def __call__(self) -> int:
        """Show them, or prune them. Returns 0. Raises ExperimentError: no such folder."""
        if not self.folder.is_dir():
            raise ExperimentError(f"{self.folder}: there is no such folder; `shardpair run` makes {RUNS}")
        folders = [path for path in (self.folder, *_folders_in(self.folder)) if (path / OUTCOME).is_file()]
        console = results_console()
        if not self.prune:
            runs = sorted(map(_saved_run, folders), key=lambda run: run.created_utc)
            if self.json:
                print_json(runs)
            else:
                console.print(terminal_table(table_of("", COLUMNS, runs, words=4)))
            return 0
        removals, left_alone = [], {}
        for folder in folders:
            try:
                removals += _pruned(folder, really=self.yes)
            except (ExperimentError, RecordError) as error:
                left_alone[str(folder)] = str(error)
        size = sum(removal.bytes for removal in removals)
        if self.json:
            print_json({"removed": self.yes, "bytes": size, "removals": removals, "left_alone": left_alone})
            return 0
        for folder, why in left_alone.items():
            errors_console().print(f"left alone: {folder}: {why}", style="yellow")
        for removal in removals:
            console.print(f"{removal.folder}: {removal.why}: {human_bytes(removal.bytes)}")
        done = "removed" if self.yes else "can be removed: give --yes"
        console.print(f"{human_bytes(size)} {done}" if removals else "there is nothing to remove")
        return 0


COLUMNS: list[Column[SavedRun]] = [
    Column("folder", lambda run: run.folder),
    Column("command", lambda run: run.command),
    Column("experiment", lambda run: run.experiment),
    Column("layout", lambda run: run.layout),
    Column("verdict", lambda run: run.verdict),
    Column("began (UTC)", lambda run: run.created_utc[:16].replace("T", " ")),
    Column("size", lambda run: run.bytes, human_bytes),
]


def _folders_in(folder: Path) -> list[Path]:
    """The folders in a folder that can be read and are no links, by name."""
    inside = (path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted(path for path in inside if os.access(path, os.R_OK | os.X_OK))


def _saved_run(folder: Path) -> SavedRun:
    size = _size(folder)
    try:
        outcome = read_study(folder)[1]
    except RecordError as error:
        return SavedRun(folder=str(folder), verdict=str(error), bytes=size)
    layouts = {case.experiment.layout for case in outcome.cases.values()} or {outcome.experiment.layout}
    judged = outcome.verdicts or outcome.study == "run"
    return SavedRun(
        folder=str(folder),
        command=outcome.study,
        experiment=outcome.name,
        layout=_in_settings(layouts.pop()) if len(layouts) == 1 else "",
        verdict=outcome.sentence() if judged else f"{outcome.progress}; shardpair report {folder}",
        created_utc=outcome.circumstances.created_utc,
        bytes=size,
    )


def _in_settings(layout: Layout) -> str:
    """The fields of a layout that are not the default, as they are written; "one device" if all are."""
    default = to_builtins(Layout())
    changed = [f"{name}={value}" for name, value in to_builtins(layout).items() if value != default[name]]
    return " ".join(changed) or "one device"


def _size(path: Path) -> int:
    if path.is_symlink() or not path.is_dir():
        return os.lstat(path).st_size
    return sum(os.lstat(os.path.join(at, name)).st_size for at, _, names in os.walk(path) for name in names)


def _pruned(folder: Path, *, really: bool) -> list[Removal]:
    """What can be removed of a run, removed if `really`; links are never followed.

    Everything is looked at, and removed, under the locks of the run and of its cases, in which a side may be
    at work. Raises ExperimentError: one is held; RecordError: the outcome is garbled.
    """
    with contextlib.ExitStack() as locks:
        for path in (folder, *_folders_in(folder)):
            locks.enter_context(lock_folder(path))
        outcome, removals = read_outcome(folder), []

        def remove(place: Path, why: str, paths: list[Path]) -> None:
            names, size = [str(path) for path in paths], sum(map(_size, paths))
            removals.append(Removal(folder=str(place), why=why, files=names, bytes=size))
            for path in paths if really else ():
                shutil.rmtree(path) if path.is_dir() else path.unlink()

        if tensors := tensors_of(folder, outcome):
            if really:
                save(replace(outcome, tensors_removed=True), folder)
            remove(folder, "tensors of the ladder, which passed", tensors)
        for path in _folders_in(folder):
            case = (name := _SET_ASIDE.fullmatch(path.name)) and name["case"]
            if case in outcome.cases and (path / REQUEST).is_file() and (folder / case / MANIFEST).is_file():
                remove(path, "set aside, and run again since", [path])
    return removals
