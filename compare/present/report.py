"""The report of a run: loss over steps, what each engine cost, held and sent, and how far they are apart."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from compare.contract.communication import Communication, summed
from compare.contract.record import Record, Step
from compare.host.disk import write_atomically
from compare.judge.costs import cost_of, steady_steps
from compare.judge.ladder import LADDER, Verdict, rungs_of
from compare.judge.ledger_lines import Line
from compare.judge.outcome import Outcome, read_run
from compare.judge.strategy import done_words
from compare.numerics.parameters import parameter_count
from compare.present.hosts import host_table
from compare.present.ledger import line_words, patterns_of
from compare.present.memory import at_peak, memory_figures, peak_table, peak_words, resting_table
from compare.present.profile import measured_figures, planned_figures
from compare.present.tables import REMOVED, cost_rows
from compare.show.figures import INK, Figure, curves, differences
from compare.show.findings import NONE, Column, Findings, Row, Table, Text, table_of
from compare.show.page import write_page
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import to_toml
from compare.studies.ledgers import EngineLedger, engine_ledger
from compare.terminal import error_text, human_bytes, layout_in_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE, EXPERIMENT = "report.html", "experiment.toml"
Named = Mapping[str, Record]
"""Records by the names of their cases."""
COINCIDE = 1e-3
"""Of the loss: less than the width of a line."""
HICCUP = 3
"""Times the 95th percentile: a step that a busy machine held up is left out of the frame."""
RATIOS = {
    "step time, median (ms)": "step_time_ms_median",
    "step time, p95 (ms)": "step_time_ms_p95",
    "tokens/s, at the median step": "tokens_per_s",
    "CPU time, all in all (s)": "cpu_time_s",
    "peak memory per device": "peak_mem_bytes",
    "collectives per step": "comm_calls",
    "communicated per step": "comm_bytes",
}
"""Rows of the cost table that say how many times the first case's they are, and the figure that they show."""


def write_report(folder: Path) -> Path:
    """Write `folder/report.html` and experiment.toml beside it. Returns the page's path.

    Raises:
        RecordError: no case of it has finished, or a file of it is garbled.
    """
    outcome, records = read_run(folder)
    write_atomically(folder / EXPERIMENT, to_toml(outcome.experiment).encode())
    return write_page(
        folder / PAGE, report(outcome, dict(zip(outcome.finished, records, strict=True)), folder)
    )


def report(outcome: Outcome, records: Named, folder: Path) -> Findings:
    """The findings of the page."""
    experiments = {name: request.experiment for name, request in outcome.requests.items()}
    layouts = dict.fromkeys(layout_in_words(one, outcome.platform) for one in experiments.values())
    ledgers = {name: engine_ledger(name, record) for name, record in records.items()}
    on_hosts = dict.fromkeys(
        (one.manifest.experiment.layout, tuple(one.manifest.hosts))
        for one in records.values()
        if len(set(one.manifest.hosts)) > 1
    )
    peaks = {name: at_peak(record) for name, record in records.items()}
    tables = [
        cost_table(outcome),
        *([ladder_table(outcome.verdicts)] if outcome.verdicts else []),
        *(host_table(layout, hosts) for layout, hosts in on_hosts),
        resting_table(records),
        *([peak_table(peaks, below=peak_words(peaks))] if any(peaks.values()) else []),
        ledger_table(records, ledgers),
    ]
    experiment, circumstances = outcome.experiment, outcome.circumstances
    return Findings(
        title=f"{outcome.name}: one experiment, {len(experiments)} case{'s' * (len(experiments) != 1)}",
        sentence=outcome.sentence(),
        value=outcome,
        passed=outcome.passed,
        about=[
            "; ".join(f"{words[0].upper()}{words[1:]}" for words in layouts) + ".",
            f"{parameter_count(experiment.model):,} parameters, {experiment.train.max_iters} steps, "
            f"{experiment.precision.dtype}. {circumstances.machine.system}, {outcome.device_kind}. "
            f"{circumstances.created_utc[:16].replace('T', ' ')} UTC.",
            *([f"The {REMOVED}."] if outcome.tensors_removed else []),
        ],
        figures=[loss_figure(records), *([difference_figure(records)] if len(records) > 1 else [])],
        more_figures=[
            norm_figure(records),
            time_figure(records),
            *memory_figures(records),
            *measured_figures(records),
            *planned_figures(records.values()),
        ],
        tables=tables,
        details=[
            *([reason_table(outcome.verdicts)] if outcome.verdicts else []),
            *(manifest_table(name, record) for name, record in records.items()),
        ],
        notes=[
            *patterns_of(ledgers.values()),
            *(f"{name} is incomplete: {why}." for name, one in ledgers.items() for why in one.problems),
        ],
        missing=outcome.undone,
        continuation="" if outcome.is_complete else outcome.how_to_go_on(folder.absolute()),
        left_out=outcome.left_out,
        spec=to_toml(experiment),
        command=outcome.line,
        source=f"{circumstances.made_by}. Verdicts and costs are in outcome.json beside this page; each "
        f"engine's folder has its steps, its ledger and the rest of its record.",
    )


def _over_steps(records: Named, value: Callable[[Step], float]) -> dict[str, tuple[list[int], list[float]]]:
    return {
        name: ([step.step for step in record.steps], [value(step) for step in record.steps])
        for name, record in records.items()
    }


def loss_figure(records: Named, title: str = "Loss over steps") -> Figure:
    """Every case's loss, laid over each other, and what it was on validation data."""

    def draw(axes: "Axes") -> None:
        curves(axes, _over_steps(records, lambda step: step.loss), "loss (nats)")
        for place, record in enumerate(records.values()):
            size = 3 + 4 * (len(records) - place) / len(records)  # where they coincide, one in the other
            steps = [one.step for one in record.evaluations]
            losses = [one.validation for one in record.evaluations]
            label = "validation" if steps else "_"
            axes.plot(steps, losses, "D", color=INK, markersize=size, fillstyle="none", label=label)

    return Figure(title=title, caption=how_close(records), draw=draw)


def difference_figure(records: Named) -> Figure:
    """Difference of every other case's loss from the first one's, relative."""
    first, *others = records

    def draw(axes: "Axes") -> None:
        lines = {
            name: (
                [step.step for step in records[first].steps],
                relative_differences(records[first], records[name]),
            )
            for name in others
        }
        differences(axes, lines, f"|loss - {first}| / loss")

    caption = f"Step by step, as a fraction of the loss of {first}. Rounding alone makes some: the same sums "
    return Figure(
        title="Difference of the loss", caption=f"{caption}in another order, fed back each step.", draw=draw
    )


def norm_figure(records: Named) -> Figure:
    """Every case's gradient norm, and where clipping begins."""
    clip = next(iter(records.values())).manifest.experiment.optimizer.grad_clip

    def draw(axes: "Axes") -> None:
        curves(axes, _over_steps(records, lambda step: step.grad_norm), "gradient norm")
        if clip:
            axes.axhline(clip, color=INK, linewidth=1, linestyle=":", label=f"clipped to {clip:g}")

    caption = "The global norm over all parameters, before clipping."
    return Figure(title="Gradient norm", caption=caption, draw=draw)


def time_figure(records: Named) -> Figure:
    """Every case's step time over its steady steps."""
    steady = {name: steady_steps(record) for name, record in records.items()}
    lines = {
        name: ([one.step for one in steps], [one.step_time_ms for one in steps])
        for name, steps in steady.items()
    }

    def draw(axes: "Axes") -> None:
        curves(axes, lines, "step time (ms)", reduce=statistics.median)
        for line in axes.lines:
            line.set_linewidth(1.2)
        slowest = max(cost_of(record).step_time_ms_p95 for record in records.values())
        largest = max(value for _, values in lines.values() for value in values)
        axes.set_ylim(0, 1.05 * min(largest, HICCUP * slowest))

    return Figure(
        title="Step time over steps",
        caption=f"Steady steps, neither the first nor the watched one, of one process after another: an "
        f"order of magnitude, and no ranking. The axis ends at {HICCUP} times the largest 95th percentile.",
        draw=draw,
    )


def relative_differences(reference: Record, record: Record) -> list[float]:
    """|loss - reference's| / |reference's| at every step that both have; NaN where one is not finite."""
    pairs = zip(reference.steps, record.steps, strict=False)
    return [abs(b.loss - a.loss) / abs(a.loss) if a.loss else abs(b.loss) for a, b in pairs]


def how_close(records: Named) -> str:
    """A sentence on whether the loss curves can be told apart at all."""
    reference, *others = records.values()
    off = [
        (value, name, record.steps[place].step)
        for name, record in zip(list(records)[1:], others, strict=True)
        for place, value in enumerate(relative_differences(reference, record))
    ]
    if not off:
        return "Before the update, over the global batch."
    if lost := next((one for one in off if not math.isfinite(one[0])), None):
        return f"{lost[1]} cannot be compared from step {lost[2]} on: a loss is not finite."
    worst, name, step = max(off)
    if worst == 0:
        return f"All {len(records)} curves are equal, bit for bit."
    if worst < COINCIDE:
        return (
            f"All {len(records)} curves lie on each other: the furthest off is {name} at step {step}, by "
            f"{worst:.1e} of the loss."
        )
    return f"The curves part: {name} is off by {worst:.1e} of the loss at step {step}."


def cost_table(outcome: Outcome) -> Table:
    """Every case's figures, with the ratios of those that can be compared to the first case's."""
    costs, rows = outcome.costs, []
    for label, cells in cost_rows(outcome):
        notes = [""] * len(cells)
        if label in RATIOS and (first := getattr(costs[0], RATIOS[label])):
            notes = ["", *(f"×{getattr(cost, RATIOS[label]) / first:.2f}" for cost in costs[1:])]  # noqa: RUF001
        rows.append(Row(Text(label), [Text(cell, note) for cell, note in zip(cells, notes, strict=True)]))
    peak = "" if all(cost.mfu is UNSET for cost in costs) else " MFU is their share of the vendor's peak."
    times = f"× is how many times the figure of {outcome.finished[0]}. " if len(costs) > 1 else ""  # noqa: RUF001
    below = f"{times}GFLOP/s are the model's, forward and backward, without what is computed anew.{peak}"
    return Table(name="Costs", corner="figure", columns=outcome.finished, rows=rows, below=below)


def ladder_table(verdicts: Sequence[Verdict]) -> Table:
    """Every case's error on every rung, with the worst tensor or step, and the tolerance."""
    rows = []
    for rung in rungs_of(verdicts):
        results = [next((one for one in verdict.rungs if one.rung == rung), None) for verdict in verdicts]
        cells = [
            Text("not compared", verdict.skipped.get(rung, ""))
            if result is None
            else Text(
                error_text(result.error),
                result.worst if result.error else "",
                "pass" if result.passed else "fail",
            )
            for verdict, result in zip(verdicts, results, strict=True)
        ]
        limit = next((_tolerance(one.tolerance) for one in results if one), NONE)
        rows.append(Row(Text(rung.replace("_", " ")), [Text(limit), *cells]))
    return Table(
        name=f"The ladder, against {', '.join(dict.fromkeys(one.reference for one in verdicts))}",
        corner="rung",
        columns=["tolerance", *(verdict.candidate for verdict in verdicts)],
        rows=rows,
        below="Relative to the largest entry of each tensor; the worst tensor or step is named. The first "
        "rung that fails is the verdict.",
    )


def reason_table(verdicts: Sequence[Verdict]) -> Table:
    """Why each rung has its tolerance."""
    reasons = {one.rung: one for verdict in verdicts for one in verdict.rungs}
    rows = [
        Row(Text(rung.replace("_", " ")), [Text(_tolerance(one.tolerance)), Text(one.reason)])
        for rung in LADDER
        if (one := reasons.get(rung))
    ]
    return Table(
        name="Why these tolerances", corner="rung", columns=["tolerance", "reason"], rows=rows, look="words"
    )


def _tolerance(limit: float) -> str:
    return "exact" if limit == 0 else f"{limit:.0e}"


def ledger_table(records: Named, ledgers: Mapping[str, EngineLedger]) -> Table:
    """What a device of each case sends in a steady step, by collective, axis and purpose."""
    sent = {
        name: {(one.axis, one.kind, one.purpose): one for one in summed(record.ledger.rows)}
        for name, record in records.items()
    }
    lines = {name: _worst(one) for name, one in ledgers.items()}
    keys = {key for of_case in (*sent.values(), *lines.values()) for key in of_case}
    rows = [
        Row(
            Text(f"{kind} over {axis}", purpose),
            [_traffic(sent[name].get(key), lines[name].get(key)) for name in records],
        )
        for key in sorted(keys)
        for axis, kind, purpose in [key]
    ]
    costs = map(cost_of, records.values())
    total = [
        Text(
            human_bytes(one.comm_bytes), f"{one.comm_calls:,} calls, wire {human_bytes(one.comm_wire_bytes)}"
        )
        for one in costs
    ]
    rows.append(Row(Text("all"), total, is_total=True))
    return Table(
        name="Communication of one step",
        corner="per device",
        columns=list(records),
        rows=rows,
        below="Logical bytes are the sizes of the full tensors; wire bytes are what a device sends, if "
        "collectives go round a ring. = is the closed form of the layout to the byte.",
    )


def _worst(ledger: EngineLedger) -> dict[tuple[str, str, str], Line]:
    """Per row, the line of the pipeline rank with the largest deviation."""
    first = {(line.axis, line.kind, line.purpose): line for line in reversed(ledger.lines)}
    return {key: line for key, line in first.items() if line.found or not line.is_explained}


def _traffic(item: Communication | None, line: Line | None) -> Text:
    if item is None and line is None:
        return Text(NONE)
    size = Text(
        human_bytes(item.bytes) if item else "nothing",
        f"{item.calls:,} call{'s' * (item.calls != 1)}, wire {human_bytes(item.wire_bytes)}" if item else "",
    )
    if line is None:
        return size
    words, news = line_words(line)
    return msgspec.structs.replace(size, note=", ".join(filter(None, (size.note, words))), news=news)


def manifest_table(name: str, record: Record) -> Table:
    """Circumstances of one case."""
    manifest, done = record.manifest, done_words(record)
    facts = {
        "engine": manifest.engine,
        "layout": layout_in_words(manifest.experiment, manifest.platform),
        "devices": f"{manifest.devices} x {manifest.device_kind} ({manifest.platform})",
        "threads": manifest.threads,
        "versions": ", ".join(f"{package} {version}" for package, version in manifest.versions.items()),
        "gradient synchronisation": done.gradient_sync,
        "recomputed in backward": done.remat,
        "compiled by": done.compiled,
        "parameters": f"{manifest.parameters:,}",
        "started (UTC)": manifest.started_utc,
        "peak memory, by device": ", ".join(map(human_bytes, manifest.peak_memory_bytes)),
        "peak memory is": manifest.peak_memory_method,
        "initial weights, SHA-256": manifest.initial_weights_sha256,
        "data, SHA-256": manifest.corpus_sha256,
    }
    columns = [Column[tuple[str, str]]("fact", lambda fact: fact[0])]
    columns.append(Column("value", lambda fact: fact[1] or NONE))
    title = f"How {name} was run: {ENGINES[manifest.engine].decides}"
    return table_of(title, columns, list(facts.items()), look="words")
