"""Write the page of a lesson from a finished run of several engines, and from the tree that runs.

The same records and the same tree give the same bytes: no date and no folder of a machine is in it. Two runs
differ in the times of their timelines alone.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup
from msgspec import Struct

from compare.contract.record import Record
from compare.host.disk import write_atomically
from compare.host.tensors import RecordError
from compare.judge.known_deviations import PATTERNS
from compare.judge.outcome import Outcome, read_run
from compare.numerics.parameters import parameter_count
from compare.present.lesson import holdings, rings, worked
from compare.present.lesson.code import Link, highlighted
from compare.present.lesson.rows import Cell, Compiled, Row, compiled_steps, ledger_rows
from compare.present.lesson.sources import Source, read_sources
from compare.present.memory_tables import at_peak
from compare.present.report.lanes import measured_steps
from compare.present.report.memory import at_rest, memory_table, peak_table
from compare.present.report.pictures import Picture, peak_words, timelines
from compare.present.report.template import render_page
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError
from compare.studies.ledgers import EngineLedger, LedgerStudy, engine_ledger
from compare.studies.lessons import FOLDERS, LESSONS, lesson_experiment, run_command
from compare.terminal import layout_in_words

PACKAGES = ("python", "jax", "torch")
BY_HAND = "manual"
"""Folder of the engines whose columns a page opens with, beside the first one, until its reader chooses."""


class Column(Struct, frozen=True, kw_only=True):
    """One engine's file, ready for the template."""

    engine: str
    decides: str
    path: str
    summary: str
    code: Markup
    marked: list[int]
    """Lines with something that makes data move, or says where they live, or that XLA names."""
    compiled: list[Compiled] | None
    """None for an engine whose step is not compiled."""
    has_moved: bool
    """The file is another one than was compiled."""


def write_lesson(strategy: str, folder: Path, output: Path) -> Outcome:
    """Write the page of a strategy.

    Args:
        strategy: a name in LESSONS.
        folder: of a finished run, such as `shardpair run` leaves.
        output: the page.

    Returns:
        The run's outcome.

    Raises:
        RecordError: the folder holds no such run, or a source file shows no collective.
        ExperimentError: the run's layout does not have the strategy.
    """
    comparison, records = read_run(folder)
    page = lesson_page(strategy, comparison, _by_engine(records, folder))
    write_atomically(output, page.encode())
    return comparison


def lesson_page(strategy: str, comparison: Outcome, records: Mapping[str, Record]) -> str:
    """The page as HTML.

    Args:
        strategy: a name in LESSONS.
        comparison: of the run, for its verdict and its layout.
        records: by engine; an engine without one has no column.
    """
    lesson = LESSONS[strategy]
    experiment = next(iter(records.values())).manifest.experiment
    if experiment.layout.axes[lesson.axis] == 1:
        raise ExperimentError(
            f"{strategy}: the run has layout.{lesson.axis} = 1, which shows nothing of it: take one such as "
            f"`{run_command(strategy)}` makes"
        )
    sources = read_sources(strategy, list(records))
    ledgers = [engine_ledger(engine, record) for engine, record in records.items()]
    rows = ledger_rows(sources, records, ledgers)
    peaks = [at_peak(record) for record in records.values()]
    columns = [_column(source, records[source.engine], rows) for source in sources]
    return render_page(
        "lesson.html",
        strategy=strategy,
        lesson=lesson,
        comparison=comparison,
        intro=_intro(sources),
        commands=_commands(strategy, comparison),
        layout=layout_in_words(experiment, comparison.platform),
        experiment=experiment,
        parameters=parameter_count(experiment.model),
        versions=_versions(comparison),
        columns=columns,
        shown=[
            engine for place, engine in enumerate(records) if not place or ENGINES[engine].folder == BY_HAND
        ],
        checked={engine: ENGINES[engine].checks for engine in records},
        holdings=_holdings(list(records), experiment),
        collectives=_collectives(rows),
        worked_in=worked.sentence(),
        derivation=worked.derivation(strategy),
        worked=worked.table(strategy),
        pays=worked.when_it_pays(strategy),
        sources=worked.SOURCES,
        missing=[engine for engine in FOLDERS if engine not in records],
        rows=rows,
        ledgers=ledgers,
        lined_up=LedgerStudy(ledgers=ledgers).sentence(),
        patterns=_patterns(ledgers),
        memory=memory_table(list(records), [at_rest(record) for record in records.values()]),
        peaks=peak_table(list(records), peaks) if any(peaks) else None,
        moments=peak_words(list(records), peaks),
        timelines=_timelines(records),
    )


def _holdings(engines: list[str], experiment: Experiment) -> list[Picture]:
    """Who holds what: a picture of each group of engines that hold the same."""
    tiles = (
        f"{holdings.tiles_in_words(experiment)}. Filled is what the device keeps: parameters and optimizer "
        "state between two steps, gradients until the update."
    )
    return [
        Picture(", ".join(group), holdings.picture(group[0], experiment), "" if place else tiles)
        for place, group in enumerate(holdings.alike(engines, experiment))
    ]


def _collectives(rows: Sequence[Row]) -> list[Picture]:
    """A picture of each kind of collective that carries tensors, those with most bytes first."""
    carried: dict[str, dict[str, None]] = {}
    for row in rows:
        kind, _, purpose = row.key
        if row.stages and kind in rings.RINGS:
            carried.setdefault(kind, {})[purpose] = None
    return [
        Picture(kind, rings.picture(kind), f"{rings.caption(kind)} Here it carries {', '.join(purposes)}.")
        for kind, purposes in carried.items()
    ]


def _by_engine(records: Sequence[Record], folder: Path) -> dict[str, Record]:
    """The first record of each engine of the grid, in the grid's order."""
    found: dict[str, Record] = {}
    for record in records:
        found.setdefault(record.manifest.engine, record)
    ours = {engine: found[engine] for engine in FOLDERS if engine in found}
    if not ours:
        raise RecordError(f"{folder} has no record of {', '.join(FOLDERS)}: a lesson is made from theirs")
    return ours


def _intro(sources: Sequence[Source]) -> list[str]:
    """Two sentences on the strategy, from the files' docstrings: by hand, and by somebody else."""
    found = [match[0] for source in sources if (match := re.search(r"\bby [^:]+: .*", source.summary))]
    by_hand = [sentence for sentence in found if sentence.startswith("by hand")]
    others = [sentence for sentence in found if sentence not in by_hand]
    return [f"{sentence[0].upper()}{sentence[1:]}" for sentence in (*by_hand[:1], *others[:1])]


def _commands(strategy: str, comparison: Outcome) -> tuple[str, str]:
    """The command that makes the page, and the one that makes its run; "" if it is not the lesson's own."""
    own = lesson_experiment(strategy)
    given = comparison.experiment
    if (given.model, given.layout, given.train) == (own.model, own.layout, own.train):
        return f"shardpair lesson {strategy}", run_command(strategy)
    return f"shardpair lesson {strategy} --results RUN_DIR", ""


def _versions(comparison: Outcome) -> str:
    seen = comparison.circumstances.versions
    return ", ".join(f"{name} {seen[name]}" for name in PACKAGES if name in seen)


def _column(source: Source, record: Record, rows: Sequence[Row]) -> Column:
    instructions = record.instructions or []
    compiled = compiled_steps(source, instructions, rows)
    cells = [(row, row.cells[source.engine]) for row in rows if source.engine in row.cells]
    links = _links(cells, compiled)
    targets = {}
    for mark in source.marks:
        caused = [cell.anchor for row, cell in cells if mark.causes(row.key[0], row.key[2])]
        made = [link.anchor for link in links.get(mark.line, [])] if not mark.sends else []
        if found := caused or made:
            targets[mark.line, mark.column] = found[0]
    return Column(
        engine=source.engine,
        decides=ENGINES[source.engine].decides,
        path=source.path,
        summary=source.summary,
        code=highlighted(source.text, source.marks, prefix=source.engine, targets=targets, links=links),
        marked=sorted({mark.line for mark in source.marks} | links.keys()),
        compiled=None if record.instructions is None else compiled,
        has_moved=any(map(source.has_moved, instructions)),
    )


def _links(cells: Sequence[tuple[Row, Cell]], compiled: Sequence[Compiled]) -> dict[int, list[Link]]:
    """What is written behind each line: the rows of the ledger that it causes, and XLA's instructions."""
    links: dict[int, list[Link]] = {}
    first_of_stages = {row.key: (row, cell) for row, cell in reversed(cells)}
    for row, cell in first_of_stages.values():
        kind, axis, purpose = row.key
        for line in cell.lines:
            links.setdefault(line, []).append(Link(cell.anchor, f"{kind} · {purpose or axis}"))
    for line in sorted({step.line for step in compiled} - {0}):
        made = [step for step in compiled if step.line == line]
        count = f" and {len(made) - 1} more" if len(made) > 1 else ""
        links.setdefault(line, []).append(Link(made[0].anchor, f"HLO {made[0].number}{count}"))
    return links


def _patterns(ledgers: Sequence[EngineLedger]) -> dict[str, str]:
    """The known patterns that explain some line."""
    why = [line.why for ledger in ledgers for line in ledger.lines]
    return {name: text for name, text in PATTERNS.items() if any(name in one.split(", ") for one in why)}


def _timelines(records: Mapping[str, Record]) -> list[Picture]:
    """The profiled step of each engine as it was measured, and the schedule of a pipeline as planned."""
    return [*measured_steps(list(records), list(records.values())), *timelines(list(records.values()))]
