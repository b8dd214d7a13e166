"""The report of a run: loss over steps, what each engine cost, held and sent, and how far they are apart."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from compare.contract.record import Record
from compare.host.disk import write_atomically
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
)
from compare.show.figures import INK, Figure, curves, differences
from compare.show.findings import Findings
from compare.show.page import write_page
from compare.spec.experiment import to_toml
from compare.studies.ledgers import engine_ledger
from compare.study import findings_of
from compare.terminal import layout_in_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE, EXPERIMENT = "report.html", "experiment.toml"
Named = Mapping[str, Record]
"""Records by the names of their cases."""
COINCIDE = 1e-3
"""Of the loss: less than the width of a line."""


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
    experiment = outcome.experiment
    requests = [request.experiment for request in outcome.requests.values()]
    layouts = dict.fromkeys(layout_in_words(asked, outcome.platform) for asked in requests)
    ledgers = [engine_ledger(name, record) for name, record in records.items()]
    manifests = [record.manifest for record in records.values()]
    hosts = dict.fromkeys((one.experiment.layout, tuple(one.hosts)) for one in manifests)
    found = findings_of(
        outcome,
        title=f"{outcome.name}: one experiment, {len(requests)} case{'s' * (len(requests) != 1)}",
        sentence=outcome.sentence(),
        passed=outcome.passed,
        about=[
            "; ".join(f"{words[0].upper()}{words[1:]}" for words in layouts) + ".",
            f"{parameter_count(experiment.model):,} parameters, {experiment.train.max_iters} steps, "
            f"{experiment.precision.dtype}, {outcome.device_kind}.",
            *([f"The {REMOVED}."] if outcome.tensors_removed else []),
        ],
        figures=[loss_figure(records), *([difference_figure(records)] if len(records) > 1 else [])],
        tables=[
            cost_table(outcome),
            *([ladder_table(outcome.verdicts)] if outcome.verdicts else []),
            *(host_table(layout, names) for layout, names in hosts if len(set(names)) > 1),
            resting_table(records),
            *peak_tables(records),
            ledger_table(records, outcome),
            *map(table_of_layout, layouts_of([ledger for ledger in ledgers if ledger.flows])),
        ],
        details=[manifest_table(name, record) for name, record in records.items()],
        notes=[f"{ledger.case}: {why}." for ledger in ledgers for why in ledger.unexpected],
    )
    return msgspec.structs.replace(
        found,
        continuation="" if outcome.is_complete else outcome.how_to_go_on(folder.absolute()),
        more_figures=[
            norm_figure(records),
            *memory_figures(records),
            *measured_figures(records),
            *planned_figures(records.values()),
        ],
    )


def loss_figure(records: Named, title: str = "Loss over steps") -> Figure:
    """Every case's loss, laid over each other, and what it was on validation data."""
    lines = {name: {step.step: step.loss for step in record.steps} for name, record in records.items()}

    def draw(axes: "Axes") -> None:
        curves(axes, lines, "loss (nats)")
        for place, record in enumerate(records.values()):
            size = 3 + 4 * (len(records) - place) / len(records)  # where they coincide, one in the other
            losses = {evaluation.step: evaluation.validation for evaluation in record.evaluations}
            look: dict[str, Any] = {"color": INK, "markersize": size, "fillstyle": "none"}
            if losses:
                axes.plot(list(losses), list(losses.values()), "D", label="validation", **look)

    return Figure(title=title, caption=how_close(records), draw=draw)


def difference_figure(records: Named) -> Figure:
    """Difference of every other case's loss from the first one's, relative."""
    first, *others = records
    lines = {name: relative_differences(records[first], records[name]) for name in others}
    return Figure(
        title="Difference of the loss",
        caption=f"Step by step, as a fraction of the loss of {first}. Rounding alone makes some: the same "
        f"sums in another order, fed back each step.",
        draw=lambda axes: differences(axes, lines, f"|loss - {first}| / loss"),
    )


def norm_figure(records: Named) -> Figure:
    """Every case's gradient norm, and where clipping begins."""
    clip = next(iter(records.values())).manifest.experiment.optimizer.grad_clip
    lines = {name: {step.step: step.grad_norm for step in record.steps} for name, record in records.items()}

    def draw(axes: "Axes") -> None:
        curves(axes, lines, "gradient norm")
        if clip:
            axes.axhline(clip, color=INK, linewidth=1, linestyle=":", label=f"clipped to {clip:g}")

    caption = "The global norm over all parameters, before clipping."
    return Figure(title="Gradient norm", caption=caption, draw=draw)


def relative_differences(reference: Record, record: Record) -> dict[int, float]:
    """|loss - reference's| / |reference's| at every step that both have; NaN where one is not finite."""
    pairs = zip(reference.steps, record.steps, strict=False)
    return {b.step: abs(b.loss - a.loss) / abs(a.loss) if a.loss else abs(b.loss) for a, b in pairs}


def how_close(records: Named) -> str:
    """A sentence on whether the loss curves can be told apart at all."""
    first, *others = records
    off = [
        (error if math.isfinite(error) else math.inf, name, step)
        for name in others
        for step, error in relative_differences(records[first], records[name]).items()
    ]
    if not off:
        return "Before the update, over the global batch."
    worst, name, step = max(off, key=lambda place: place[0])
    if worst == 0:
        return f"All {len(records)} curves are equal, bit for bit."
    if math.isinf(worst):
        return f"{name} cannot be compared from step {step} on: a loss is not finite."
    lie = "lie on each other" if worst < COINCIDE else "part"
    return f"The curves {lie}: the furthest off is {name} at step {step}, by {worst:.1e} of the loss."
