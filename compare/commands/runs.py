"""`shardpair runs`: what was run here, a line each; with --prune, what of it can be removed."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import tyro
from msgspec import Struct
from rich import box
from rich.table import Table

from compare.commands.kept_runs import KeptRun, kept_runs
from compare.commands.pruning import Pruning, removable, remove
from compare.execute.paths import RUNS
from compare.spec.experiment import Experiment, ExperimentError
from compare.terminal import errors_console, human_bytes, human_days, print_json, results_console

SECONDS_OF_DAY = 86400


class Runs(Struct, frozen=True, kw_only=True):
    """Show what was run here, a line each: layout, verdict, age and size; --prune frees room.

    --prune removes the ladder's tensors (gradients, weights, moments) of runs that passed, whose verdicts
    stay; and what `--continue` set aside of cases that have finished since, with their checkpoints. Nothing
    else is removed, and no run that is in use is touched.

    Try:
      shardpair runs
      shardpair runs --prune                               (says what would go; asks, in a terminal)
      shardpair runs runs --prune --older_than 7 --keep 5 --yes
    """

    folder: Annotated[Path, tyro.conf.Positional] = RUNS
    """A folder of runs, or of one run."""
    prune: bool = False
    """Say what can be removed, and how much that frees. Removes it after a question, or with --yes."""
    older_than: float = 0.0
    """With --prune: look at runs of at least so many days alone."""
    keep: int = 0
    """With --prune: leave the newest so many runs as they are."""
    yes: bool = False
    """With --prune: remove without a question."""
    json: bool = False
    """Print one JSON object on stdout instead of tables; asks nothing."""

    def __call__(self, default: Experiment) -> int:
        """Show them, or prune them. Returns 0. Raises ExperimentError: no such folder, or odd flags."""
        self._require_sense()
        runs = kept_runs(self.folder)
        if self.prune:
            return self._pruned(runs)
        if self.json:
            print_json(runs)
        elif not runs:
            results_console().print(f"{self.folder} has no runs")
        else:
            results_console().print(_table(runs))
        return 0

    def _require_sense(self) -> None:
        if not self.folder.is_dir():
            raise ExperimentError(f"{self.folder}: there is no such folder; `shardpair run` makes {RUNS}")
        for flag in ("older_than", "keep", "yes"):
            value = getattr(self, flag)
            if value and not self.prune:
                raise ExperimentError(f"--{flag} has no effect without --prune")
            if not value >= 0:
                raise ExperimentError(f"--{flag} {value} must be at least 0")

    def _pruned(self, runs: list[KeptRun]) -> int:
        older = runs[: max(len(runs) - self.keep, 0)]
        found = removable([run for run in older if self._is_old(run)])
        asks = not self.json and not self.yes and sys.stdin.isatty() and sys.stdout.isatty()
        if not self.json:
            _print_pruning(found)
        goes = bool(found.removals) and (self.yes or (asks and _is_yes(input("Remove them? [y/N] "))))
        if goes:
            remove(found)
        if self.json:
            print_json({"removed": goes, "bytes": found.bytes, **_fields(found)})
        elif goes:
            results_console().print(f"removed: {human_bytes(found.bytes)} are free again")
        elif found.removals:
            results_console().print(f"nothing was removed{'' if asks else f': {self._again()} removes it'}")
        return 0

    def _is_old(self, run: KeptRun) -> bool:
        """Whether a run is at least as old as asked; one that does not say its age is not."""
        age = run.age
        return not self.older_than or (
            age is not None and age.total_seconds() >= self.older_than * SECONDS_OF_DAY
        )

    def _again(self) -> str:
        given = [f"--{name} {value:g}" for name in ("older_than", "keep") if (value := getattr(self, name))]
        return f"`{' '.join(['shardpair runs', shlex.quote(str(self.folder)), '--prune', *given, '--yes'])}`"


def _table(runs: list[KeptRun]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("folder", "command", "experiment", "layout", "verdict"):
        table.add_column(name, overflow="fold")
    table.add_column("age", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    for run in runs:
        age = "" if run.age is None else human_days(run.age.total_seconds())
        cells = (run.folder, run.command, run.experiment, run.layout, run.verdict)
        table.add_row(*cells, age, human_bytes(run.bytes))
    return table


def _print_pruning(found: Pruning) -> None:
    console = results_console()
    for folder, why in found.left_alone.items():
        errors_console().print(f"left alone: {why if folder in why else f'{folder}: {why}'}", style="yellow")
    if not found.removals:
        console.print("there is nothing to remove")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("can be removed", overflow="fold")
    table.add_column("what it is")
    table.add_column("frees", justify="right", no_wrap=True)
    for removal in found.removals:
        table.add_row(removal.path, removal.what, human_bytes(removal.bytes))
    console.print(table)
    console.print(f"{human_bytes(found.bytes)} all in all")


def _fields(found: Pruning) -> dict[str, object]:
    return {name: getattr(found, name) for name in found.__struct_fields__}


def _is_yes(answer: str) -> bool:
    return answer.strip().lower() in ("y", "yes")
