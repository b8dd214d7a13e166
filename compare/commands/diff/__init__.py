"""`shardpair diff`: compare two finished runs of any settings."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import tyro
from msgspec import Struct

from compare.commands.diff.difference import SHARED, Difference, difference
from compare.commands.run.page import rung_text
from compare.contract.record import Record, read_record
from compare.flags import AsJson
from compare.judge.outcome import OUTCOME, read_outcome, read_run
from compare.run.metrics import METRICS
from compare.show.envelope import state_of
from compare.show.findings import Findings, Row, Table, Text, by_reason, format_value
from compare.show.terminal import print_findings
from compare.system.tensors import RecordError

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
    json: AsJson = False

    def __call__(self) -> int:
        """Compare. Returns 0 if the runs are alike, 1 if not. Raises RecordError: nothing can be compared."""
        found = findings_of_pair(self.a, self.b)
        print_findings(found, as_json=self.json)
        return 0 if found.passed else 1


def findings_of_pair(a: Path, b: Path) -> Findings:
    """The comparison of two runs; `values["pairs"]` has a `Difference` for each case.

    Raises RecordError: nothing can be compared.
    """
    of_a, of_b = _records(a), _records(b)
    pairs = [(name, name) for name in of_a if name in of_b] or [(next(iter(of_a)), next(iter(of_b)))]
    compared = {record.folder for one, other in pairs for record in (of_a[one], of_b[other])}
    every = [record.folder for record in (*of_a.values(), *of_b.values())]
    records = {
        one if one == other else f"{one} and {other}": (of_a[one], of_b[other]) for one, other in pairs
    }
    differences = {
        name: difference(*both, names=(str(both[0].folder), str(both[1].folder)))
        for name, both in records.items()
    }
    lines = {name: f"{name}: {in_words(pair)}" for name, pair in differences.items()}
    odd = [name for name, pair in differences.items() if not pair.verdict.passed]
    if len(lines) == 1:
        (sentence,), notes = lines.values(), list[str]()
    else:
        differ = f"{len(odd)} of {len(lines)} cases differ: {', '.join(odd)}"
        sentence, notes = differ if odd else f"all {len(lines)} cases are alike", [*lines.values()]
    skipped = {rung: why for pair in differences.values() for rung, why in pair.verdict.skipped.items()}
    notes = [f"not compared: {', '.join(of)} ({why})" for why, of in by_reason(skipped).items()] + notes
    if not any(pair.settings for pair in differences.values()):
        notes.insert(0, "the settings and versions are equal")
    return Findings(
        study="diff",
        title=f"{a} and {b}",
        sentence=sentence,
        passed=not odd,
        is_doubtful=bool(skipped),
        cases={
            name: state_of(pair.verdict, engine=records[name][1].manifest.engine)
            for name, pair in differences.items()
        },
        tables=[table for table in tables_of(differences) if table.rows],
        notes=notes,
        left_out={
            str(place): "the other folder has no case of this name"
            for place in every
            if place not in compared
        },
        values={"alike": not odd, "pairs": differences},
    )


def in_words(pair: Difference) -> str:
    """The verdict on two records in one line."""
    verdict = pair.verdict
    if verdict.failure:
        return verdict.sentence().replace("FAIL at", "differ at", 1)
    others = f", {len(verdict.skipped)} not compared" if verdict.skipped else ""
    return f"alike on {len(verdict.rungs)} rungs{others}, over {pair.steps} steps"


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
