"""The page of a lesson, from a finished run of several engines and from the tree that runs."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from pygments.formatters.html import HtmlFormatter

from compare.commands.ledger import engine_ledgers, layouts_of, table_of_layout
from compare.commands.ledger.chips import Program, sent_in_words
from compare.commands.lesson import holdings, rings
from compare.commands.lesson.listing import File, anchor_of, read_file
from compare.commands.memory import memory_tables
from compare.commands.profile import profile_of, warn_of_watching
from compare.commands.profile.figures import measured_figures, planned_figures
from compare.contract.communication import METRICS, Communication, summed
from compare.contract.ledger import SCALAR
from compare.contract.record import Record
from compare.execute.cpu_load import warn_of_load
from compare.judge.outcome import Outcome
from compare.numerics.parameters import parameter_count
from compare.setup.lessons import FOLDERS, LESSONS, run_command, source_files
from compare.show.envelope import states_of
from compare.show.findings import Findings
from compare.show.page import write_page
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import ExperimentError
from compare.text import layout_in_words

_PLACE = re.compile(r"^([\w./-]+\.py):(\d+)")
MOST_PLACES = 3
Key = tuple[str, str, str]
"""Operation, axis and purpose of a row of a ledger."""


class Source(Struct, frozen=True, kw_only=True):
    """One engine's files of a strategy, and which of their lines sent something in a run."""

    engine: str
    files: list[File]
    """The file of the strategy's name first."""
    lines: Mapping[Key, dict[str, str]]
    """Lines of these files that cause a row: anchors and their words, such as `line 70`."""
    elsewhere: Mapping[Key, list[str]]
    """Other places that a row comes from, if no line of these files causes it."""


def write_lesson(
    strategy: str,
    outcome: Outcome,
    records: Mapping[str, Record],
    output: Path,
    programs: Sequence[Program] = (),
) -> Findings:
    """Write the page of a strategy from the records of a finished run, by engine. Returns its findings.

    `programs` were compiled for chips that are not here; each has a column of messages. An engine without a
    record has no column. Raises ExperimentError: the layout does not have the strategy.
    """
    lesson, experiment = LESSONS[strategy], next(iter(records.values())).manifest.experiment
    if experiment.layout.axes[lesson.axis] == 1:
        raise ExperimentError(
            f"{strategy}: the run has layout.{lesson.axis} = 1, which shows nothing of it: take one such as "
            f"`{run_command(strategy)}` makes"
        )
    sources = [read_source(strategy, engine, record) for engine, record in records.items()]
    devices: dict[str, int] = {}
    for row in (row for record in records.values() for row in record.ledger.rows):
        devices[row.kind] = max(row.group_size, devices.get(row.kind, 0))
    sent = {
        engine: {key_of(row): row for row in summed(record.ledger.rows)} for engine, record in records.items()
    }
    on_chips = {f"{one.engine} on {one.chip}": sent_on_chip(one) for one in programs}
    most: dict[Key, int] = {}
    carried: dict[str, dict[str, None]] = {}
    for key, row in (item for rows in sent.values() for item in rows.items()):
        most[key] = max(row.bytes, most.get(key, 0))
        if row.kind in rings.RINGS and row.bytes > SCALAR * row.calls and row.purpose != METRICS:
            carried.setdefault(row.kind, {})[row.purpose] = None
    for key in (key for words in on_chips.values() for key in words):
        most.setdefault(key, 0)
    keys = sorted(most, key=lambda key: (-most[key], key))
    layout = layout_in_words(experiment, outcome.platform)
    headline, *exceptions = re.split(r"; (?![^(]*\))", outcome.sentence())
    findings = Findings(
        study="lesson",
        title=f"{lesson.title}: one question, {len(sources)} answers",
        sentence=headline if outcome.passed else outcome.sentence(),
        page=str(output),
        cases=states_of(outcome),
        values={"strategy": strategy, "engines": outcome.finished, "outcome": outcome},
        passed=outcome.passed,
        about=[
            f"{layout[0].upper()}{layout[1:]}.",
            f"All of this page is from the source tree and from one real run: "
            f"{parameter_count(experiment.model):,} parameters, {experiment.train.max_iters} steps, "
            f"{experiment.precision.dtype}, {outcome.platform.upper()}. {outcome.circumstances.made_by}.",
        ],
        warnings=warn_of_load(outcome),
        tables=[
            *map(table_of_layout, layouts_of(engine_ledgers(outcome, records))),
            *memory_tables(records),
        ],
        left_out=outcome.left_out,
        notes=[
            *(f"{line}." for line in exceptions if outcome.passed),
            *(f"{engine} has no record in this run." for engine in FOLDERS if engine not in records),
        ],
        command=f"shardpair lesson {strategy}",
        source=f"Its run alone: {run_command(strategy)}",
    )
    light, dark = (HtmlFormatter(style=name).get_style_defs(".code") for name in ("default", "github-dark"))
    write_page(
        output,
        findings,
        template="lesson.html",
        styles=f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}",
        pictures={
            "holds": [
                holdings.figure(group, experiment) for group in holdings.group_alike(records, experiment)
            ],
            "hops": [
                rings.figure(kind, list(purposes), devices[kind] or experiment.layout.devices)
                for kind, purposes in carried.items()
            ],
            "schedule": planned_figures(records),
            "timeline": measured_figures(records),
        },
        watching=warn_of_watching([profile_of(*item) for item in records.items()]),
        sources=sources,
        engines=ENGINES,
        sent=sent,
        on_chips=on_chips,
        anchors={key: "row-" + re.sub(r"\W+", "-", "-".join(filter(None, key))) for key in keys},
    )
    return findings


def sent_on_chip(one: Program) -> dict[Key, str]:
    """Bytes, dtypes and calls of a compiled program in words, by row of the page's table."""
    by_key: dict[Key, list[Communication]] = {}
    for row in one.rows:
        by_key.setdefault(key_of(row), []).append(row)
    return {
        key: f"{sent_in_words(rows)}; {sum(row.calls for row in rows if row.is_async):,} asynchronous"
        for key, rows in by_key.items()
    }


def read_source(strategy: str, engine: str, record: Record) -> Source:
    """An engine's files of a strategy from the tree that runs, and what of a record came from them.

    A row of a ledger has its innermost line of ours. XLA also says from where that was called: of a stack
    this is the innermost line of the lesson, if it has one.
    """
    paths = source_files(engine, strategy)
    by_name = {path.rpartition("/")[2]: path for path in reversed(paths)}
    senders: dict[Key, dict[tuple[str, int], None]] = {}
    elsewhere: dict[Key, dict[str, None]] = {}
    for row in record.ledger.rows:
        key = key_of(row)
        if inside := [place for place in row.places if place[0] in paths]:
            senders.setdefault(key, {})[inside[0]] = None
        elif place := _PLACE.match(row.source):
            if path := by_name.get(place[1].rpartition("/")[2]):
                senders.setdefault(key, {})[path, int(place[2])] = None
            else:
                elsewhere.setdefault(key, {})[place[0]] = None
    sending = set().union(*senders.values())
    return Source(
        engine=engine,
        files=[
            read_file(
                path, engine, {line for file, line in sending if file == path}, is_main=path == paths[0]
            )
            for path in paths
        ],
        lines={
            key: {
                anchor_of(engine, path, line): f"line {line}"
                if path == paths[0]
                else f"{Path(path).name}:{line}"
                for path, line in sorted(places, key=lambda place: (paths.index(place[0]), place[1]))
            }
            for key, places in senders.items()
        },
        elsewhere={
            key: list(places)[:MOST_PLACES] for key, places in elsewhere.items() if key not in senders
        },
    )


def key_of(row: Communication) -> Key:
    """The row of the page's table that a row of a ledger belongs to."""
    return row.kind, row.axis, row.purpose
