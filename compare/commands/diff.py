"""`shardpair diff`: two finished runs, of any settings, held against each other."""

from pathlib import Path
from typing import Annotated

import tyro
from msgspec import Struct

from compare.contract.record import Record, read_record
from compare.execute.paths import PICTURES, check_output
from compare.host.tensors import RecordError
from compare.judge.difference import RATES, Difference, common, difference
from compare.judge.ladder import LADDER
from compare.judge.outcome import OUTCOME, read_outcome
from compare.present.report import difference_figure, loss_figure
from compare.present.tables import rung_text
from compare.show.figures import save_figures
from compare.show.findings import Row, Table, Text, by_reason
from compare.show.page import leave_page
from compare.show.terminal import terminal_table
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
        of_a, of_b = _records(self.a), _records(self.b)
        pairs = [(name, name) for name in of_a if name in of_b] or [(next(iter(of_a)), next(iter(of_b)))]
        found = {
            one if one == two else f"{one} and {two}": difference(
                of_a[one], of_b[two], names=(_label(self.a, one), _label(self.b, two))
            )
            for one, two in pairs
        }
        alike = all(one.alike for one in found.values())
        if self.json:
            print_json({"alike": alike, "pairs": found})
        else:
            _print(results_console(), found)
        if self.picture:
            names = [label for one, two in pairs for label in (_label(self.a, one), _label(self.b, two))]
            runs = [run for one, two in pairs for run in common(of_a[one], of_b[two])]
            leave_page(lambda: self._drawn(names, runs), as_json=self.json, label="picture")
        return 0 if alike else 1

    def _drawn(self, names: list[str], runs: list[Record]) -> Path:
        """Save the curves of all runs, over the steps that the two of each pair share."""
        assert self.picture
        named = dict(zip(names, runs, strict=True))
        save_figures(self.picture, [loss_figure(named), difference_figure(named)], columns=2)
        return self.picture


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


def tables_of(found: dict[str, Difference]) -> list[Table]:
    """What was asked, each change once with the pairs that it is of; errors by rung; costs."""
    whose: dict[tuple[str, str, str], list[str]] = {}
    for name, pair in found.items():
        for change in pair.settings:
            whose.setdefault((change.field, change.a, change.b), []).append(name)
    asked = [
        Row(Text(field), [Text(a), Text(b), Text("" if len(pairs) == len(found) else ", ".join(pairs))])
        for (field, a, b), pairs in whose.items()
    ]
    verdicts = [pair.verdict for pair in found.values()]
    rungs = [
        Row(Text(rung), [rung_text(verdict, rung) for verdict in verdicts])
        for rung in (*LADDER, RATES)
        if any(verdict.error(rung) is not None for verdict in verdicts)
    ]
    costs = [{label: _cell(*both) for label, both in pair.costs.items()} for pair in found.values()]
    labels = dict.fromkeys(label for of in costs for label in of)
    cost_rows = [Row(Text(label), [Text(of.get(label, "")) for of in costs]) for label in labels]
    names = list(found)
    return [
        Table(name="What was asked", corner="setting", columns=["A", "B", "of"], rows=asked, look="words"),
        Table(name="Relative errors of B against A", corner="rung", columns=names, rows=rungs),
        Table(
            name="Costs, A to B (B/A); timings of runs that were not interleaved",
            corner="per engine",
            columns=names,
            rows=cost_rows,
        ),
    ]


def _cell(a: float, b: float) -> str:
    before, after = (f"{x:,}" if isinstance(x, int) else f"{x:,.5g}" for x in (a, b))
    if before == after:
        return before
    return f"{before} to {after}" + (f" ({b / a:.2f})" if a else "")  # none over nothing


def _print(console: PlainConsole, found: dict[str, Difference]) -> None:
    if not any(pair.settings for pair in found.values()):
        console.print("asked for the same, on the same versions")
    for table in tables_of(found):
        if table.rows:
            console.print(terminal_table(table))
    skipped = {rung: why for pair in found.values() for rung, why in pair.verdict.skipped.items()}
    for why, rungs in by_reason(skipped).items():
        console.print(f"not compared: {', '.join(rungs)} ({why})", soft_wrap=True)
    for name, pair in found.items():
        said = f"alike on {len(pair.verdict.rungs)} rungs, over {pair.steps} steps"
        if pair.verdict.failure:
            said = pair.verdict.sentence().replace("FAIL at", "differ at", 1)
        console.print(f"{name}: {said}", style="bold green" if pair.alike else "bold red", soft_wrap=True)
