"""`shardpair runs`: what was run here, a line each."""

import os
from pathlib import Path
from typing import Annotated, Any

import tyro
from msgspec import Struct

from compare.execute.paths import RUNS
from compare.host.tensors import RecordError
from compare.judge.outcome import OUTCOME
from compare.show.findings import Column, table_of
from compare.show.terminal import terminal_table
from compare.spec.experiment import ExperimentError
from compare.studies.registry import read_study
from compare.terminal import human_bytes, layout_in_words, print_json, results_console

Row = dict[str, Any]
"""A folder with results, by the keys of `COLUMNS` that JSON has."""


class Runs(Struct, frozen=True, kw_only=True):
    """Show what was run here, a line each: layout, verdict, begin and size.

    Try:
      shardpair runs
    """

    folder: Annotated[Path, tyro.conf.Positional] = RUNS
    """A folder of runs, or of one run."""
    json: bool = False
    """Print one JSON object on stdout instead of tables."""

    def __call__(self) -> int:
        """Show them. Returns 0. Raises ExperimentError: no such folder."""
        if not self.folder.is_dir():
            raise ExperimentError(f"{self.folder}: there is no such folder; `shardpair run` makes {RUNS}")
        inside = (path for path in self.folder.iterdir() if path.is_dir() and not path.is_symlink())
        readable = sorted(path for path in inside if os.access(path, os.R_OK | os.X_OK))
        folders = [path for path in (self.folder, *readable) if (path / OUTCOME).is_file()]
        runs = sorted(map(_row, folders), key=lambda run: run["created_utc"])
        if self.json:
            print_json(runs)
        else:
            results_console().print(terminal_table(table_of("", COLUMNS, runs, words=4)))
        return 0


SAID = ("folder", "command", "experiment", "layout", "verdict")
COLUMNS = (
    *(Column[Row](key, lambda run, key=key: run[key]) for key in SAID),
    Column[Row]("began (UTC)", lambda run: run["created_utc"][:16].replace("T", " ")),
    Column[Row]("size", lambda run: run["bytes"], human_bytes),
)


def _row(folder: Path) -> Row:
    """Its layout in words, one verdict or the command that shows it, and the bytes of its files."""
    walk = ((at, name) for at, _, names in os.walk(folder) for name in names)
    size = sum(os.lstat(os.path.join(at, name)).st_size for at, name in walk)  # links are not followed
    try:
        outcome = read_study(folder)[1]
    except RecordError as error:
        unknown = dict.fromkeys((*SAID, "created_utc"), "")
        return {**unknown, "folder": str(folder), "verdict": str(error), "bytes": size}
    trained = [case.experiment for case in outcome.cases.values()] or [outcome.experiment]
    layouts = {layout_in_words(experiment, outcome.platform) for experiment in trained}
    judged = outcome.verdicts or outcome.study == "run"
    return {
        "folder": str(folder),
        "command": outcome.study,
        "experiment": outcome.name,
        "layout": layouts.pop() if len(layouts) == 1 else "",
        "verdict": outcome.sentence() if judged else f"{outcome.progress}; shardpair report {folder}",
        "created_utc": outcome.circumstances.created_utc,
        "bytes": size,
    }
