"""The page of a lesson, from a finished run of several engines and from the tree that runs."""

import re
from collections.abc import Mapping
from pathlib import Path

from compare.contract.communication import METRICS, summed
from compare.contract.ledger import SCALAR
from compare.contract.record import Record
from compare.host.tensors import RecordError
from compare.judge.outcome import Outcome, read_run
from compare.numerics.parameters import parameter_count
from compare.present.ledger import layouts_of, table_of_layout
from compare.present.lesson import holdings, rings, worked
from compare.present.lesson.sources import Key, read_source, styles
from compare.present.memory import peak_tables, resting_table
from compare.present.profile import measured_figures, planned_figures
from compare.show.findings import Findings
from compare.show.page import write_page
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import ExperimentError
from compare.studies.ledgers import engine_ledger
from compare.studies.lessons import FOLDERS, LESSONS, run_command
from compare.terminal import layout_in_words


def write_lesson(strategy: str, folder: Path, output: Path) -> Outcome:
    """Write the page of a strategy from a finished run. Returns the run's outcome.

    Raises:
        RecordError: the folder holds no such run.
        ExperimentError: the run's layout does not have the strategy.
    """
    outcome, every = read_run(folder)
    named = {record.manifest.engine: record for record in reversed(every)}
    records = {engine: named[engine] for engine in FOLDERS if engine in named}
    if not records:
        raise RecordError(f"{folder} has no record of {', '.join(FOLDERS)}: a lesson is made from theirs")
    lesson_page(strategy, outcome, records, output)
    return outcome


def lesson_page(strategy: str, outcome: Outcome, records: Mapping[str, Record], output: Path) -> None:
    """Write the page; an engine without a record has no column."""
    lesson, experiment = LESSONS[strategy], next(iter(records.values())).manifest.experiment
    if experiment.layout.axes[lesson.axis] == 1:
        raise ExperimentError(
            f"{strategy}: the run has layout.{lesson.axis} = 1, which shows nothing of it: take one such as "
            f"`{run_command(strategy)}` makes"
        )
    sources = [read_source(strategy, engine, record) for engine, record in records.items()]
    sent = {
        engine: {(row.kind, row.axis, row.purpose): row for row in summed(record.ledger.rows)}
        for engine, record in records.items()
    }
    most: dict[Key, int] = {}
    carried: dict[str, dict[str, None]] = {}
    for row in (row for rows in sent.values() for row in rows.values()):
        key = row.kind, row.axis, row.purpose
        most[key] = max(row.bytes, most.get(key, 0))
        if row.kind in rings.RINGS and row.bytes > SCALAR * row.calls and row.purpose != METRICS:
            carried.setdefault(row.kind, {})[row.purpose] = None
    keys = sorted(most, key=lambda key: (-most[key], key))
    ledgers = [engine_ledger(engine, record) for engine, record in records.items()]
    layout = layout_in_words(experiment, outcome.platform)
    findings = Findings(
        title=f"{lesson.title}: one question, {len(sources)} answers",
        sentence=outcome.sentence(),
        value=outcome,
        passed=outcome.passed,
        about=[
            f"{layout[0].upper()}{layout[1:]}.",
            f"All of this page is from the source tree and from one real run: "
            f"{parameter_count(experiment.model):,} parameters, {experiment.train.max_iters} steps, "
            f"{experiment.precision.dtype}, {outcome.platform.upper()}. {outcome.circumstances.made_by}.",
        ],
        figures=[
            *(holdings.figure(group, experiment) for group in holdings.alike(list(records), experiment)),
            *(rings.figure(kind, list(purposes)) for kind, purposes in carried.items()),
        ],
        more_figures=[*measured_figures(records), *planned_figures(records.values())],
        tables=[
            *map(table_of_layout, layouts_of(ledgers)),
            resting_table(records),
            *peak_tables(records),
        ],
        notes=[f"{engine} has no record in this run." for engine in FOLDERS if engine not in records],
        command=f"shardpair lesson {strategy}",
        source=f"Its run alone: {run_command(strategy)}",
    )
    write_page(
        output,
        findings,
        template="lesson.html",
        styles=styles(),
        sources=sources,
        engines=ENGINES,
        worked=worked,
        strategy=strategy,
        sent=sent,
        anchors={key: "row-" + re.sub(r"\W+", "-", "-".join(filter(None, key))) for key in keys},
        trials=lesson.trials,
    )
