"""`shardpair diff`: two finished runs, of any settings, held against each other."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro
from msgspec import Struct
from rich import box
from rich.table import Table

from compare.contract.record import Record, read_record
from compare.execute.paths import PICTURES, check_output
from compare.host.tensors import RecordError
from compare.judge.ladder import LADDER
from compare.judge.outcome import OUTCOME, read_outcome
from compare.judge.run_changes import CostChange
from compare.judge.run_difference import RATES, Difference, common, difference
from compare.present.report import difference_figure, loss_figure
from compare.present.tables import rung_text
from compare.show.figures import save_figures
from compare.show.findings import by_reason
from compare.show.page import leave_page
from compare.show.terminal import cell_of
from compare.spec.experiment import Experiment
from compare.terminal import PlainConsole, print_json, results_console


class Diff(Struct, frozen=True, kw_only=True):
    """Hold two finished runs against each other, of any settings, days, engines or layouts.

    Says what differs in what was asked of them, rung by rung how far their numbers are apart, and what each
    cost. Tensors are compared where both runs have them in the same shapes, and losses, gradient norms and
    learning rates over the steps that both made. Exit code 0 if all numbers are within the tolerances of the
    coarser precision, 1 if not, 2 if there is nothing to compare; costs decide nothing.

    Two folders of runs are compared engine by engine; if they share none, or one is the folder of a single
    engine, its case of the same name or else the first one is taken.

    Try:
      shardpair diff runs/demo-20260101-120000 runs/demo-20260102-120000
      shardpair diff runs/demo-20260101-120000/jax-manual runs/demo-20260101-120000/torch-manual
      shardpair diff runs/before runs/after --picture losses.png
    """

    a: Annotated[Path, tyro.conf.Positional]
    """The folder of a run, or RUN/ENGINE of one engine's: what the other is held against."""
    b: Annotated[Path, tyro.conf.Positional]
    """Of the other run."""
    picture: Path | None = None
    """Also save the loss curves, and their differences from the first one's (.png, .svg, .pdf)."""
    json: bool = False
    """Print the outcome as one JSON object on stdout instead of tables."""

    def __call__(self, default: Experiment) -> int:
        """Compare. Returns 0 if they are alike, 1 if not. Raises RecordError: nothing can be compared."""
        check_output("--picture", self.picture, kinds=PICTURES)
        pairs = _pairs(_records(self.a), _records(self.b))
        names = [(_label(self.a, one), _label(self.b, two)) for one, two in pairs]
        found = {
            one if one == two else f"{one} and {two}": difference(a, b, names=name)
            for name, ((one, two), (a, b)) in zip(names, pairs.items(), strict=True)
        }
        alike = all(one.alike for one in found.values())
        if self.json:
            print_json({"alike": alike, "pairs": found})
        else:
            _print(results_console(), found)
        if self.picture:
            path = self.picture
            leave_page(lambda: _drawn(path, names, list(pairs.values())), as_json=self.json, label="picture")
        return 0 if alike else 1


def _records(folder: Path) -> dict[str, Record]:
    """The finished records of a run by its case's name, or the one of a single engine."""
    if not (folder / OUTCOME).is_file():
        records = {folder.absolute().name: read_record(folder)}
    else:
        records = {name: read_record(folder / name) for name in read_outcome(folder).finished}
    if not records:
        raise RecordError(f"nothing has finished in {folder}")
    return records


def _label(folder: Path, case: str) -> str:
    """The name of a record for people: RUN/CASE."""
    return str(folder / case if (folder / OUTCOME).is_file() else folder)


def _pairs(a: dict[str, Record], b: dict[str, Record]) -> dict[tuple[str, str], tuple[Record, Record]]:
    """What is held against what, by their names."""
    names = [(name, name) for name in a if name in b] or [(next(iter(a)), next(iter(b)))]
    return {(one, two): (a[one], b[two]) for one, two in names}


def _drawn(path: Path, names: Sequence[tuple[str, str]], pairs: Sequence[tuple[Record, Record]]) -> Path:
    """Save the curves of all runs, over the steps that the two of each pair share."""
    shown = [name for pair in names for name in pair]
    runs = dict(zip(shown, (run for a, b in pairs for run in common(a, b)), strict=True))
    save_figures(path, [loss_figure(runs), difference_figure(runs)], columns=2)
    return path


def _print(console: PlainConsole, found: dict[str, Difference]) -> None:
    _print_settings(console, found)
    _print_rungs(console, found)
    _print_costs(console, found)
    for name, one in found.items():
        failure = one.verdict.failure
        if failure is None:
            said = f"{name}: alike on {len(one.verdict.rungs)} rungs, over {one.steps} steps"
        else:
            said = f"{name}: {one.verdict.sentence().replace('FAIL at', 'differ at', 1)}"
        console.print(said, style="bold green" if one.alike else "bold red", soft_wrap=True)


def _print_settings(console: PlainConsole, found: dict[str, Difference]) -> None:
    """Each change once, with the pairs that it is of, if not of all."""
    whose: dict[tuple[str, str, str], list[str]] = {}
    for name, one in found.items():
        for change in one.settings:
            whose.setdefault((change.field, change.a, change.b), []).append(name)
    if not whose:
        console.print("asked for the same, on the same versions")
        return
    table = _table("What was asked", "setting", "A", "B", "of", align="left")
    for change, pairs in whose.items():
        table.add_row(*change, "" if len(pairs) == len(found) else ", ".join(pairs))
    console.print(table)


def _print_rungs(console: PlainConsole, found: dict[str, Difference]) -> None:
    table = _table("Relative errors of B against A", "rung", *found)
    verdicts = {name: one.verdict for name, one in found.items()}
    for rung in [*LADDER, RATES]:
        if any(verdict.error(rung) is not None for verdict in verdicts.values()):
            table.add_row(rung, *(cell_of(rung_text(verdict, rung)) for verdict in verdicts.values()))
    console.print(table)
    skipped = {rung: why for verdict in verdicts.values() for rung, why in verdict.skipped.items()}
    for why, rungs in by_reason(skipped).items():
        console.print(f"not compared: {', '.join(rungs)} ({why})", soft_wrap=True)


def _print_costs(console: PlainConsole, found: dict[str, Difference]) -> None:
    table = _table("Costs, A to B (B/A); timings of runs that were not interleaved", "per engine", *found)
    costs = {name: {one.cost: one for one in pair.costs} for name, pair in found.items()}
    for label in dict.fromkeys(label for rows in costs.values() for label in rows):
        cells = (rows.get(label) for rows in costs.values())
        table.add_row(label, *(_cell(change) if change else "" for change in cells))
    console.print(table)


def _cell(change: CostChange) -> str:
    before, after = (f"{x:,}" if isinstance(x, int) else f"{x:,.5g}" for x in (change.a, change.b))
    if before == after:
        return before
    ratio = f" ({change.ratio:.2f})" if math.isfinite(change.ratio) else ""  # none over nothing
    return f"{before} to {after}{ratio}"


def _table(title: str, first: str, *others: str, align: Literal["left", "right"] = "right") -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column(first)
    for other in others:
        table.add_column(other, overflow="fold", justify=align)
    return table
