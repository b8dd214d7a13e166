"""The report of a run: loss over steps, what each engine cost, held and sent, and how far they are apart."""

import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from compare.contract.record import Record, Step
from compare.host.disk import write_atomically
from compare.judge.metrics import figures, steady_steps
from compare.judge.outcome import Outcome, read_run
from compare.numerics.parameters import parameter_count
from compare.present.hosts import host_table
from compare.present.ledger import layouts_of, table_of_layout
from compare.present.memory import memory_figures, peak_tables, resting_table
from compare.present.profile import measured_figures, planned_figures
from compare.present.tables import (
    REMOVED,
    cost_table,
    ladder_table,
    ledger_table,
    manifest_table,
    reason_table,
)
from compare.show.figures import INK, Figure, curves, differences
from compare.show.findings import Findings
from compare.show.page import write_page
from compare.spec.experiment import to_toml
from compare.studies.ledgers import engine_ledger
from compare.terminal import layout_in_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE, EXPERIMENT = "report.html", "experiment.toml"
Named = Mapping[str, Record]
"""Records by the names of their cases."""
COINCIDE = 1e-3
"""Of the loss: less than the width of a line."""
HICCUP = 3
"""Times the 95th percentile: a step that a busy machine held up is left out of the frame."""


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
    ledgers = [engine_ledger(name, record) for name, record in records.items()]
    on_hosts = dict.fromkeys(
        (one.manifest.experiment.layout, tuple(one.manifest.hosts))
        for one in records.values()
        if len(set(one.manifest.hosts)) > 1
    )
    tables = [
        cost_table(outcome),
        *([ladder_table(outcome.verdicts)] if outcome.verdicts else []),
        *(host_table(layout, hosts) for layout, hosts in on_hosts),
        resting_table(records),
        *peak_tables(records),
        ledger_table(records, outcome),
        *map(table_of_layout, layouts_of([ledger for ledger in ledgers if ledger.flows])),
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
        notes=[f"{ledger.case}: {why}." for ledger in ledgers for why in ledger.unexpected],
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
        slowest = max(figures(record)["step_time_ms_p95"] for record in records.values())
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
