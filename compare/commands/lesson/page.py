"""The page of a lesson, from a finished run of several engines and from the tree that runs."""

import ast
import re
from collections.abc import Mapping
from pathlib import Path

from markupsafe import Markup, escape
from msgspec import Struct
from pygments import highlight
from pygments.formatters.html import HtmlFormatter
from pygments.lexers.python import PythonLexer

from compare.commands.ledger import engine_ledgers, layouts_of, table_of_layout
from compare.commands.lesson import holdings, rings
from compare.commands.memory import memory_tables
from compare.commands.profile.figures import timeline_figures
from compare.contract.communication import METRICS, Communication, summed
from compare.contract.ledger import SCALAR
from compare.contract.record import Record
from compare.judge.outcome import Outcome
from compare.numerics.parameters import parameter_count
from compare.setup.lessons import FOLDERS, LESSONS, run_command, source_file
from compare.setup.planted import ROOT
from compare.show.findings import Findings
from compare.show.page import write_page
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import ExperimentError
from compare.text import layout_in_words

_PLACE = re.compile(r"^([\w./-]+\.py):(\d+)")
LIBRARY = "torch.distributed"
"""Calls of what is imported from there send without a line of ours."""
MOST_PLACES = 3
Key = tuple[str, str, str]
"""Operation, axis and purpose of a row of a ledger."""


class Source(Struct, frozen=True, kw_only=True):
    """One engine's file of a strategy, and which of its lines sent something in a run."""

    engine: str
    path: str
    """From the folder that has the packages."""
    summary: Markup
    """The first sentence of its docstring."""
    html: Markup
    """The file with line numbers, line 12 with the anchor ENGINE-12, lines that send in a colour."""
    lines: Mapping[Key, list[int]]
    """Lines of this file that cause a row."""
    elsewhere: Mapping[Key, list[str]]
    """Other places that a row comes from, if no line of this file causes it."""


def write_lesson(strategy: str, outcome: Outcome, records: Mapping[str, Record], output: Path) -> None:
    """Write the page of a strategy from the records of a finished run, by engine.

    An engine without a record has no column. Raises ExperimentError: the layout does not have the strategy.
    """
    lesson, experiment = LESSONS[strategy], next(iter(records.values())).manifest.experiment
    if experiment.layout.axes[lesson.axis] == 1:
        raise ExperimentError(
            f"{strategy}: the run has layout.{lesson.axis} = 1, which shows nothing of it: take one such as "
            f"`{run_command(strategy)}` makes"
        )
    sources = [read_source(strategy, engine, record) for engine, record in records.items()]
    sent = {
        engine: {key_of(row): row for row in summed(record.ledger.rows)} for engine, record in records.items()
    }
    most: dict[Key, int] = {}
    carried: dict[str, dict[str, None]] = {}
    for key, row in (item for rows in sent.values() for item in rows.items()):
        most[key] = max(row.bytes, most.get(key, 0))
        if row.kind in rings.RINGS and row.bytes > SCALAR * row.calls and row.purpose != METRICS:
            carried.setdefault(row.kind, {})[row.purpose] = None
    keys = sorted(most, key=lambda key: (-most[key], key))
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
            *(holdings.figure(group, experiment) for group in holdings.group_alike(records, experiment)),
            *(rings.figure(kind, list(purposes)) for kind, purposes in carried.items()),
        ],
        more_figures=timeline_figures(records),
        tables=[
            *map(table_of_layout, layouts_of(engine_ledgers(outcome, records))),
            *memory_tables(records),
        ],
        notes=[f"{engine} has no record in this run." for engine in FOLDERS if engine not in records],
        command=f"shardpair lesson {strategy}",
        source=f"Its run alone: {run_command(strategy)}",
    )
    light, dark = (HtmlFormatter(style=name).get_style_defs(".code") for name in ("default", "github-dark"))
    write_page(
        output,
        findings,
        template="lesson.html",
        styles=f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}",
        sources=sources,
        engines=ENGINES,
        sent=sent,
        anchors={key: "row-" + re.sub(r"\W+", "-", "-".join(filter(None, key))) for key in keys},
    )


def read_source(strategy: str, engine: str, record: Record) -> Source:
    """An engine's file of a strategy from the tree that runs, and what of a record came from it.

    A row of a ledger has its innermost line of ours. XLA also says from where that was called: of a stack
    this is the innermost line of the lesson, if it has one.
    """
    path = source_file(engine, strategy)
    text = (ROOT / path).read_text(encoding="utf-8")
    lines: dict[Key, set[int]] = {}
    elsewhere: dict[Key, dict[str, None]] = {}
    for row in record.ledger.rows:
        key = key_of(row)
        if inside := [line for file, line in row.places if file == path]:
            lines.setdefault(key, set()).add(inside[0])
        if place := _PLACE.match(row.source):
            if place[1].rpartition("/")[2] == path.rpartition("/")[2]:
                lines.setdefault(key, set()).add(int(place[2]))
            else:
                elsewhere.setdefault(key, {})[place[0]] = None
    tree = ast.parse(text)
    formatter = HtmlFormatter(
        linenos="inline",
        lineanchors=engine,
        anchorlinenos=True,
        hl_lines=sorted(set().union(_library_lines(tree), *lines.values())),
        cssclass="code",
    )
    about = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
    summary = re.split(r"(?<=\.)\s", about, maxsplit=1)[0]
    return Source(
        engine=engine,
        path=path,
        summary=Markup(re.sub("`(.+?)`", r"<code>\1</code>", str(escape(summary)))),
        html=Markup(highlight(text, PythonLexer(), formatter)),
        lines={key: sorted(numbers) for key, numbers in lines.items()},
        elsewhere={key: list(places)[:MOST_PLACES] for key, places in elsewhere.items() if key not in lines},
    )


def key_of(row: Communication) -> Key:
    """The row of the page's table that a row of a ledger belongs to."""
    return row.kind, row.axis, row.purpose


def _library_lines(tree: ast.AST) -> set[int]:
    """Lines that call a function imported from PyTorch's library."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    of_library = [node for node in imports if (node.module or "").startswith(LIBRARY)]
    names = {alias.asname or alias.name for node in of_library for alias in node.names}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id in names}
