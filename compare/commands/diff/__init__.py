"""`shardpair diff`: compare two finished runs of any settings."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import tyro
from msgspec import Struct

from compare.commands.diff.difference import SHARED, Difference, difference
from compare.commands.run.page import rung_text
from compare.contract.record import Record, read_record
from compare.judge.outcome import OUTCOME, read_outcome, read_run
from compare.run.metrics import METRICS
from compare.show.findings import Row, Table, Text, by_reason, format_value
from compare.show.terminal import print_table
from compare.system.tensors import RecordError
from compare.terminal import PlainConsole, print_json, results_console

OF_KEY = {metric.key: metric for metric in METRICS}


class Diff(Struct, frozen=True, kw_only=True):
    """Compare two finished runs, of any settings, days, engines or layouts.

    Prints the settings that differ, the errors of each rung, and the costs. Tensors are compared where both
    runs have them in the same shapes; losses, gradient norms and learning rates over the steps that both
    made. Exit code 0 if all numbers are within the tolerances of the coarser precision, 1 if not, 2 if there
    is nothing to compare. Costs do not affect it.

    Two folders of runs are compared engine by engine. If they share no engine, or one is the folder of a
    single engine, the case of the same name is compared, or else the first one.

    Try:
      shardpair diff runs/demo-20260101-120000 runs/demo-20260102-120000
      shardpair diff runs/demo-20260101-120000/jax-manual runs/demo-20260101-120000/torch-manual
    """

    a: Annotated[Path, tyro.conf.Positional]
    """Folder of the first run, or RUN/ENGINE of one engine: the reference."""
    b: Annotated[Path, tyro.conf.Positional]
    """Folder of the second run."""
    json: bool = False
    """Print the outcome as one JSON object on stdout instead of tables."""

    def __call__(self) -> int:
        """Compare. Returns 0 if the runs are alike, 1 if not. Raises RecordError: nothing can be compared."""
        of_a, of_b = _records(self.a), _records(self.b)
        pairs = [(name, name) for name in of_a if name in of_b] or [(next(iter(of_a)), next(iter(of_b)))]
        compared = {record.folder for a, b in pairs for record in (of_a[a], of_b[b])}
        every = [record.folder for record in (*of_a.values(), *of_b.values())]
        left_out = [str(place) for place in every if place not in compared]
        records = {a if a == b else f"{a} and {b}": (of_a[a], of_b[b]) for a, b in pairs}
        differences = {
            name: difference(a, b, names=(str(a.folder), str(b.folder))) for name, (a, b) in records.items()
        }
        alike = all(pair.verdict.passed for pair in differences.values())
        if self.json:
            print_json({"alike": alike, "pairs": differences, "left_out": left_out})
        else:
            _print(results_console(), differences)
            if left_out:
                line = f"left out: {', '.join(left_out)}: the other folder has no case of this name"
                results_console().print(line, style="yellow", soft_wrap=True)
        return 0 if alike else 1


def _records(folder: Path) -> dict[str, Record]:
    """The finished records of a run by case, or the record of a single engine."""
    if not (folder / OUTCOME).is_file():
        return {folder.absolute().name: read_record(folder)}
    outcome = read_outcome(folder)
    if not outcome.keeps_records:
        study = outcome.study
        raise RecordError(f"{folder}: a {study} keeps no records to compare: `shardpair report` shows it")
    return read_run(folder)[1]


def tables_of(differences: dict[str, Difference]) -> Iterator[Table]:
    """Settings that differ, with the pairs in which they do; errors by rung; costs."""
    names, pairs = list(differences), differences.values()
    changes: dict[tuple[str, str, str], list[str]] = {}
    for name, pair in differences.items():
        for field, values in pair.settings.items():
            changes.setdefault((field, *values), []).append(name)
    settings = [
        Row(Text(field), [Text(a), Text(b), Text("" if len(of) == len(names) else ", ".join(of))])
        for (field, a, b), of in changes.items()
    ]
    yield Table(name="What was asked", corner="setting", columns=["A", "B", "of"], rows=settings, words=3)
    rungs = [
        Row(Text(rung.name), [rung_text(pair.verdict, rung.name) for pair in pairs])
        for rung in SHARED
        if any(pair.verdict.result(rung.name) for pair in pairs)
    ]
    yield Table(name="Relative errors of B against A", corner="rung", columns=names, rows=rungs)
    keys = dict.fromkeys(key for pair in pairs for key in pair.costs)
    title = "Costs, A to B (B/A); timings of runs that were not interleaved"
    costs = [
        Row(
            Text(OF_KEY[key].label if key in OF_KEY else key),
            [_cost(key, pair.costs.get(key)) for pair in pairs],
        )
        for key in keys
    ]
    yield Table(name=title, corner="per engine", columns=names, rows=costs)


def _cost(key: str, both: tuple[float, float] | None) -> Text:
    if not both:
        return Text("")
    before, after = (format_value(value, OF_KEY[key].form if key in OF_KEY else ",d") for value in both)
    ratio = f" ({both[1] / both[0]:.2f})" if both[0] else ""
    return Text(before if before == after else f"{before} to {after}{ratio}")


def _print(console: PlainConsole, differences: dict[str, Difference]) -> None:
    if not any(pair.settings for pair in differences.values()):
        console.print("the settings and versions are equal")
    for table in tables_of(differences):
        if table.rows:
            print_table(table)
    skipped = {rung: why for pair in differences.values() for rung, why in pair.verdict.skipped.items()}
    for why, rungs in by_reason(skipped).items():
        console.print(f"not compared: {', '.join(rungs)} ({why})", soft_wrap=True)
    for name, pair in differences.items():
        verdict = pair.verdict
        others = f", {len(verdict.skipped)} not compared" if verdict.skipped else ""
        line = f"alike on {len(verdict.rungs)} rungs{others}, over {pair.steps} steps"
        style = "bold yellow" if others else "bold green"
        if verdict.failure:
            line, style = verdict.sentence().replace("FAIL at", "differ at", 1), "bold red"
        console.print(f"{name}: {line}", style=style, soft_wrap=True)
