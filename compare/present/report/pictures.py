"""Pictures of a report, in order, and the text below each."""

import math
from collections.abc import Sequence

from markupsafe import Markup

from compare.contract.record import Record
from compare.judge.outcome import Outcome
from compare.pipeline.schedules import make_schedule
from compare.present.memory_tables import AtPeak, where
from compare.present.report import bars, figures
from compare.present.report.memory import AtRest
from compare.present.report.memory_curves import memory_over_step
from compare.present.report.timeline import summary, timeline
from compare.present.tables import how_peaks
from compare.show.findings import Picture
from compare.terminal import SCHEDULES

COINCIDE = 1e-3
"""Of the loss: less than the width of a line."""
MOST_BOXES = 1500
"""Of a timeline; more are a blur, and a megabyte."""


def pictures(comparison: Outcome, records: list[Record], held: Sequence[AtRest | None]) -> list[Picture]:
    """Curves and bars of a comparison that has records.

    Args:
        comparison: its names, costs and verdicts.
        records: one for each case.
        held: bytes at rest of each.
    """
    names, costs = comparison.finished, comparison.costs
    drawn = [Picture("Loss", figures.loss_curves(names, records), how_close(names, records))]
    if len(names) > 1:
        why = "Rounding: the same sums in another order, fed back at every step."
        caption = why if comparison.passed else f"Step by step, as a fraction of the loss of {names[0]}."
        drawn.append(Picture("Loss difference", figures.loss_differences(names, records), caption))
    return [
        *drawn,
        Picture(
            "Gradient norm",
            figures.gradient_norms(names, records),
            "The global norm over all parameters, before clipping.",
        ),
        Picture(
            "Learning rate",
            figures.learning_rates(names, records),
            "As each step recorded it.",
        ),
        Picture("Step time", bars.step_times(names, costs), _of_timing(comparison.platform)),
        Picture(
            "Step time over steps",
            figures.times_over_steps(names, records),
            f"Steady steps: neither the first nor the watched one. The axis ends at {figures.HICCUP} times "
            "the largest p95: a step beyond it was held up by the machine.",
        ),
        Picture("Peak memory", bars.peak_memory(names, costs), how_peaks(names, records)),
        Picture(
            "Memory at rest",
            bars.memory_at_rest(names, held),
            "Between two steps, gradients as they are just before the optimizer's; the line is the closed "
            "form, computed from the layout alone.",
        ),
        Picture(
            "Communication",
            bars.communication(names, costs),
            "Logical bytes: the full tensors that one device's collectives work on. What it sends on a ring "
            "stands in the table.",
        ),
    ]


def memory_curves(names: list[str], records: list[Record]) -> list[Picture]:
    """Memory over the watched step of each case that has a curve of it, of its fullest device."""
    drawn = []
    for name, record in zip(names, records, strict=True):
        profile = record.memory
        if profile and (curve := profile.devices[profile.fullest].curve):
            peak = profile.devices[profile.fullest].peak
            which = f"Device {profile.fullest}" if len(profile.devices) > 1 else "Every device"
            at = f"in {peak.phase}: {where(peak)}"
            caption = f"{which}; the dotted line is the peak, {at}. {profile.method}."
            drawn.append(Picture(f"Memory of {name}", memory_over_step(name, curve, peak), caption))
    return drawn


def peak_words(names: list[str], peaks: Sequence[AtPeak | None]) -> str:
    """Which moment the closed forms are of, and which cases have none."""
    named = [(name, one.form) for name, one in zip(names, peaks, strict=True) if one]
    whole = [form for _, form in named if form and not form.is_of_state]
    state = [name for name, form in named if form and form.is_of_state]
    without = [name for name, form in named if not form]
    moments = " or ".join(dict.fromkeys(form.moment for form in whole))
    said = [f"The closed forms are those {moments}."] if whole else []
    said += [f"Of {', '.join(state)} there is one of parameters and optimizer alone."] if state else []
    said += [f"There is none for {', '.join(without)}."] if without else []
    return " ".join(said)


def timelines(records: list[Record]) -> list[Picture]:
    """Every pipeline schedule that ran, once."""
    ran: dict[tuple[str, int, int, int], list[str]] = {}
    for record in records:
        layout, train = record.manifest.experiment.layout, record.manifest.experiment.train
        if layout.pp > 1:
            microbatches = layout.microbatches * train.gradient_accumulation_steps
            key = (layout.schedule, layout.pp, microbatches, layout.chunks)
            ran.setdefault(key, []).append(record.folder.name)
    return [_timeline(*key) for key in ran]


def _timeline(name: str, ranks: int, microbatches: int, chunks: int) -> Picture:
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    title = f"{SCHEDULES[name]}, {ranks} ranks, {microbatches} microbatches"
    said = f"The plan, on a clock, not a measurement: {summary(schedule)}. A backward takes two forwards."
    if sum(map(len, schedule)) > MOST_BOXES:
        return Picture(
            title, Markup(""), f"{said} Too many tasks to draw: `shardpair schedule --trace` writes them."
        )
    return Picture(title, timeline(f"Timeline of {title}", schedule), said)


def how_close(names: list[str], records: list[Record]) -> str:
    """A sentence on whether the loss curves can be told apart at all."""
    if len(names) == 1:
        return "Before the update, over the global batch."
    off = [
        (value, name, record.steps[step].step)
        for name, record in zip(names[1:], records[1:], strict=True)
        for step, value in enumerate(figures.relative_differences(records[0], record))
    ]
    if any(not math.isfinite(value) for value, _, _ in off):
        _, name, step = next(one for one in off if not math.isfinite(one[0]))
        return f"{name} cannot be compared from step {step} on: a loss is not finite."
    worst, name, step = max(off, default=(0.0, "", 0))
    stripes = ", hence the stripes" if len(names) > 2 else ""
    if worst == 0:
        return f"All {len(names)} curves are equal, bit for bit{stripes}."
    if worst < COINCIDE:
        return (
            f"All {len(names)} curves lie on each other{stripes}: the furthest off is {name} at step {step}, "
            f"by {worst:.1e} of the loss."
        )
    return f"The curves part: {name} is off by {worst:.1e} of the loss at step {step}."


def _of_timing(platform: str) -> str:
    timings = "CPU timings: " if platform == "cpu" else ""
    return (
        f"{timings}one process for each engine, one after another, not interleaved; compilation and the "
        f"first step are apart. Good enough to see an order of magnitude, not to rank engines."
    )
