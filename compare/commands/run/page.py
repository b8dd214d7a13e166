"""The report of a run: losses, costs, memory, messages, and errors on each rung."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from compare.commands.ledger import engine_ledgers, layouts_of, table_of_layout
from compare.commands.memory import memory_figures, memory_tables
from compare.commands.profile.figures import timeline_figures
from compare.commands.run.hosts import host_table, mesh_figure
from compare.commands.run.messages import message_figure
from compare.contract.record import Record
from compare.execute.cpu_load import warn_of_load
from compare.judge.alone import OWN_GRADIENTS
from compare.judge.outcome import Outcome
from compare.judge.rungs import RUNGS
from compare.judge.strategy import SENT
from compare.judge.verdict import Verdict
from compare.numerics.parameters import parameter_count
from compare.run.metrics import METRICS
from compare.run.study import PAGES
from compare.setup.lessons import LESSONS
from compare.setup.planted import ROOT
from compare.show.figures import INK, Axes, Figure, curves, differences
from compare.show.findings import NONE, Findings, Link, Row, Table, Text, findings_of, format_value
from compare.text import error_text, layout_in_words

Named = Mapping[str, Record]
"""Records by the names of their cases."""
COMPILERS = "docs/compilers.md"
"""The page that explains what engines send beyond the textbook."""
INVISIBLE = 1e-3
"""Relative difference of two losses from which a figure shows two curves."""
REMOVED = "tensors were removed after all rungs had passed"


def report(outcome: Outcome, records: Named, folder: Path) -> Findings:
    """The findings of the page."""
    experiment = outcome.experiment
    requests = [case.experiment for case in outcome.cases.values()]
    layouts = dict.fromkeys(layout_in_words(asked, outcome.platform) for asked in requests)
    ledgers = engine_ledgers(outcome, records)
    manifests = [record.manifest for record in records.values()]
    hosts = dict.fromkeys((one.experiment.layout, tuple(one.hosts)) for one in manifests)
    found = findings_of(
        outcome,
        title=f"{outcome.name}: one experiment, {len(requests)} engine{'s' * (len(requests) != 1)}",
        sentence=finding(outcome),
        passed=outcome.passed,
        about=[
            "; ".join(f"{words[0].upper()}{words[1:]}" for words in layouts) + ".",
            f"{parameter_count(experiment.model):,} parameters, {experiment.train.max_iters} steps, "
            f"{experiment.precision.dtype}, {manifests[0].device_kind}.",
            *([f"The {REMOVED}."] if outcome.tensors_removed else []),
        ],
        figures=[loss_figure(records), *([difference_figure(records)] if len(records) > 1 else [])],
        tables=[
            cost_table(outcome),
            *([ladder_table(outcome.verdicts)] if outcome.verdicts else []),
            *(host_table(layout, names) for layout, names in hosts if len(set(names)) > 1),
            *memory_tables(records),
            *map(table_of_layout, layouts_of([ledger for ledger in ledgers if ledger.flows])),
        ],
        warnings=warn_of_load(outcome),
        notes=[f"{ledger.case}: {why}." for ledger in ledgers for why in ledger.unexpected],
        links=links_of(outcome, folder.absolute()),
    )
    return replace(
        found,
        continuation="" if outcome.is_complete else outcome.how_to_go_on(folder.absolute()),
        more_figures=[
            *filter(None, [message_figure(records)]),
            *(mesh_figure(layout, names) for layout, names in hosts if len(names) > 1),
            *memory_figures(records),
            *timeline_figures(records),
        ],
    )


def links_of(outcome: Outcome, folder: Path) -> list[Link]:
    """Other pages in the folder of a run, docs that explain its tables, and commands that show more of it."""
    pages = sorted(page.name for page in folder.glob("*.html") if page.name != PAGES["run"])
    docs = {
        "why engines send other bytes than the textbook": COMPILERS,
        "how engines are compared": "docs/proof.md",
    }
    axes, of = outcome.experiment.layout.axes, shlex.quote(str(folder))
    lessons = [name for name, lesson in LESSONS.items() if axes[lesson.axis] > 1]
    return [
        *(Link(page, href=page) for page in pages),
        *(
            Link(words, href=os.path.relpath(ROOT / path, folder))
            for words, path in docs.items()
            if (ROOT / path).is_file()
        ),
        *(
            Link(
                f"{LESSONS[name].title}, with the source of each engine",
                command=f"shardpair lesson {name} --results {of}",
            )
            for name in lessons
        ),
        Link("Every message with its source line", command=f"shardpair ledger --results {of} --rows"),
    ]


def finding(outcome: Outcome) -> str:
    """The verdict. If all passed, also the engines that send 1% more or less than the textbook."""
    percents: dict[int, list[str]] = {}
    for name, figures in outcome.values(dict).items():
        multiple = figures.get("comm_of_textbook")
        if multiple is not None and SENT not in outcome.alone[name].uncompared:
            percents.setdefault(round(100 * multiple) - 100, []).append(name)
    if not outcome.passed:
        return outcome.sentence()
    words = [
        f"{' and '.join(names)} send{'s' * (len(names) == 1)} "
        f"{abs(percent)}% {'more' if percent > 0 else 'less'}"
        for percent, names in sorted(percents.items(), reverse=True)
        if percent
    ]
    if words:
        return f"{outcome.sentence()}. {', '.join(words)} than the textbook ({COMPILERS})"
    is_all = [*percents.values()] == [outcome.finished]
    return f"{outcome.sentence()}{'. Each sends the bytes of the textbook, within 1%' * is_all}"


def loss_figure(records: Named) -> Figure:
    """Every case's loss, and its loss on validation data; one curve if no case is apart from the first."""
    first, *others = records.values()
    apart = [value for other in others for value in relative_differences(first, other).values()]
    is_one = bool(apart) and all(value <= INVISIBLE for value in apart)
    shown = {f"all {len(records)} engines": first} if is_one else records
    lines = {name: {step.step: step.loss for step in record.steps} for name, record in shown.items()}

    def draw(axes: Axes) -> None:
        curves(axes, lines, "loss (nats)")
        for place, record in enumerate(shown.values()):
            size = 3 + 4 * (len(shown) - place) / len(shown)  # where they coincide, one in the other
            losses = {evaluation.step: evaluation.validation for evaluation in record.evaluations}
            look: dict[str, Any] = {"color": INK, "markersize": size, "fillstyle": "none"}
            if losses:
                axes.plot(list(losses), list(losses.values()), "D", label="validation", **look)

    caption = "Before the update, over the global batch."
    if is_one:
        caption += f" All {len(records)} engines within {max(apart):.0e}: their curves are drawn as one."
    return Figure(title="Loss over steps", caption=caption, draw=draw)


def difference_figure(records: Named) -> Figure:
    """Difference of every other case's loss from the first one's, relative."""
    first, *others = records
    lines = {name: relative_differences(records[first], records[name]) for name in others}
    return Figure(
        title="Difference of the loss",
        caption=f"As a fraction of the loss of {first}. A step with the same loss has no point, and engines "
        "with equal losses share a line. Sums in another order round differently, and each step adds to it.",
        draw=lambda axes: differences(axes, lines, f"|loss - {first}| / loss"),
    )


def relative_differences(reference: Record, record: Record) -> dict[int, float]:
    """|loss - reference's| / |reference's| at every step that both have; NaN where one is not finite."""
    pairs = zip(reference.steps, record.steps, strict=False)
    return {b.step: abs(b.loss - a.loss) / abs(a.loss) if a.loss else abs(b.loss) for a, b in pairs}


def cost_table(outcome: Outcome) -> Table:
    """Every case's figures, with the ratios of those that can be compared to the first case's."""
    rows, settings = [], {name: alone.settings for name, alone in outcome.alone.items()}
    cases: list[dict[str, Any]] = [
        {**settings.get(name, {}), **figures} for name, figures in outcome.values(dict).items()
    ]
    for metric in METRICS:
        values = [figures.get(metric.key) or None for figures in cases]
        if any(value is not None for value in values):
            of = values[0] if metric.has_ratio else None
            notes = ["", *(f"×{value / of:.2f}" if value and of else "" for value in values[1:])]  # noqa: RUF001
            texts = [format_value(value, metric.form) for value in values]
            rows.append(Row(Text(metric.label), [*map(Text, texts, notes)]))
    has_mfu = any(figures.get("mfu") for figures in cases)
    mfu = "; MFU is their share of the vendor's peak" * has_mfu
    return Table(
        name=f"Costs ({outcome.platform.upper()} timings, one process each, not interleaved)",
        corner="per engine",
        columns=outcome.finished,
        rows=rows,
        below=f"× is the ratio to {outcome.finished[0]}. GFLOP/s are the model's, forward and backward, "  # noqa: RUF001
        f"without recomputation{mfu}.",
    )


def ladder_table(verdicts: Sequence[Verdict]) -> Table:
    """Every case's error on every rung, with the worst tensor or step, and the tolerance."""
    rows = []
    for rung in RUNGS:
        results = [verdict.result(rung.name) for verdict in verdicts]
        if not rung.absent and not any(results):
            continue
        tolerance = next((result.tolerance for result in results if result), None)
        limit = "" if tolerance is None else f"at most {tolerance:.0e}" if tolerance else "exact"
        cells = []
        for verdict, result in zip(verdicts, results, strict=True):
            note = verdict.skipped.get(rung.name, "")
            if result:
                note = result.worst.replace(OWN_GRADIENTS, "") if result.error else ""
            cells.append(replace(rung_text(verdict, rung.name), note=note))
        rows.append(Row(Text(rung.name, limit), cells))
    references = ", ".join(dict.fromkeys(verdict.reference for verdict in verdicts))
    return Table(
        name=f"The ladder: relative errors against {references}",
        corner="rung",
        columns=[verdict.candidate for verdict in verdicts],
        rows=rows,
        below="Relative to the largest entry of each tensor; the worst tensor or step is named. The first "
        "rung that fails is the verdict.",
    )


def rung_text(verdict: Verdict, rung: str) -> Text:
    """One rung's error as a cell: bad news if it is too large, - if the rung was not compared."""
    result = verdict.result(rung)
    if result is None:
        return Text(NONE)
    return Text(error_text(result.error), news="" if result.passed else "fail")
