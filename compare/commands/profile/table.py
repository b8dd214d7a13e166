"""Tables and figures of a profile: the time of a step by engine and device."""

from collections.abc import Iterable, Mapping

import msgspec

from compare.commands.profile.timelines import EngineProfile, Profile
from compare.contract.record import Record
from compare.contract.timeline import Timeline, exposed_us, idle_us
from compare.pipeline.schedules import Kind, make_schedule
from compare.pipeline.simulator import bubble_fraction, makespan, peak_in_flight
from compare.pipeline.simulator import run as simulate
from compare.show.figures import WIDE, Box, Figure, gantt
from compare.show.findings import Column, Row, Table, Text, written
from compare.terminal import SCHEDULES

TIMES = ("forward", "backward", "update", "communication", "exposed", "idle")
ENGINE: tuple[Column[EngineProfile], ...] = (
    Column("step, unwatched (ms)", lambda engine: engine.step_ms, ".1f"),
    Column("step, watched (ms)", lambda engine: engine.watched_ms, ".1f"),
    Column("timeline's wall (ms)", lambda engine: engine.wall_ms, ".1f"),
    *(Column(f"{name} (ms)", lambda engine, name=name: engine.mean_ms(name), ".1f") for name in TIMES),
    Column("cost of watching", lambda one: one.watched_ms and one.watched_ms / one.step_ms - 1, ".0%"),
    Column("bubble, measured", lambda engine: engine.bubble, ".0%"),
    Column("bubble of the schedule", lambda engine: engine.planned_bubble, ".0%"),
)
"""Rows of the table; the last two are for pipelines."""
MOST_BOXES = 1500
"""Largest number of boxes in a figure of a schedule."""
TASKS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, input",
    Kind.BACKWARD_WEIGHT: "backward, weights",
}


def measured_figures(records: Mapping[str, Record]) -> list[Figure]:
    """The watched step of every record that has a timeline."""
    return [_measured(name, record.timeline) for name, record in records.items() if record.timeline]


def _measured(name: str, timeline: Timeline) -> Figure:
    devices = len(timeline.lanes)
    exposed = sum(map(exposed_us, timeline.lanes)) / devices / 1e3
    idle = sum(idle_us(lane, timeline.wall_us) for lane in timeline.lanes) / devices / 1e3
    boxes = [
        Box(
            row,
            span.begin_us / 1e3,
            span.duration_us / 1e3,
            span.kind,
            text=str(span.microbatch) if span.microbatch >= 0 and span.kind != "communication" else "",
            is_pale=bool(span.chunk),
            is_beside=span.kind == "communication",
        )
        for row, lane in enumerate(timeline.lanes)
        for span in lane.spans
    ]
    names = [f"device {lane.device}" for lane in timeline.lanes]
    return Figure(
        title=f"{name}, step {timeline.step}, measured",
        caption=f"{timeline.wall_us / 1e3:.1f} ms on the slowest device; on average {exposed:.1f} ms in "
        f"communication without compute at the same time, and {idle:.1f} ms idle. {timeline.method}",
        draw=lambda axes: gantt(axes, names, boxes, "ms"),
        width=WIDE,
        height=0.7 + 0.44 * devices,
    )


def planned_figures(records: Iterable[Record]) -> list[Figure]:
    """Every pipeline schedule that ran, once, on a clock; not where boxes would be a blur."""
    plans = dict.fromkeys(
        (layout.schedule, layout.pp, layout.microbatches * passes, layout.chunks)
        for experiment in (record.manifest.experiment for record in records)
        for layout, passes in [(experiment.layout, experiment.train.gradient_accumulation_steps)]
        if layout.pp > 1
    )
    figures = [schedule_figure(*plan) for plan in plans]
    return [figure for figure in figures if figure]


def schedule_figure(name: str, ranks: int, microbatches: int, chunks: int) -> Figure | None:
    """A pipeline schedule on the simulator's clock; None if its boxes are too many to read."""
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    if sum(map(len, schedule)) > MOST_BOXES:
        return None
    boxes = [
        Box(
            slot.rank,
            slot.start,
            slot.end - slot.start,
            TASKS[slot.task.kind],
            text=str(slot.task.microbatch),
            is_pale=slot.task.stage >= ranks,
        )
        for slot in simulate(schedule)
    ]
    rows = [f"rank {rank}" for rank in range(ranks)]
    stored = ", ".join(str(peak_in_flight(tasks)) for tasks in schedule)
    return Figure(
        title=f"{SCHEDULES[name]}, {ranks} ranks, {microbatches} microbatches",
        caption=f"Simulated, not measured. Makespan {makespan(schedule):g}; ranks idle "
        f"{bubble_fraction(schedule):.0%} of the time; at most {stored} activations stored, by rank. "
        "A backward pass takes as long as two forward passes.",
        draw=lambda axes: gantt(axes, rows, boxes, "time, in forward passes of one microbatch"),
        width=WIDE,
        height=0.7 + 0.3 * ranks,
    )


def engine_table(profile: Profile, name: str) -> Table:
    """A column for each engine, without rows that have no figure."""
    values = {column: [column.of(engine) for engine in profile.engines] for column in ENGINE}
    return Table(
        name=name,
        corner="mean over devices",
        columns=[engine.name for engine in profile.engines],
        rows=[
            Row(Text(column.name), [Text(written(value, column.form)) for value in row])
            for column, row in values.items()
            if any(value is not None for value in row)
        ],
    )


def chrome_trace(name: str, timeline: Timeline, *, process: int) -> bytes:
    """The timeline as Chrome's trace events, for Perfetto: an engine is a process, a device a thread.

    Compute nests in its thread. Communication overlaps with compute and with itself, and events of a thread
    may not: it is asynchronous, which Perfetto draws on tracks of its own.
    """
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": process, "args": {"name": f"{name}, step {timeline.step}"}}
    ]
    for lane in timeline.lanes:
        place = {"pid": process, "tid": lane.device}
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": f"device {lane.device}"}})
        for number, span in enumerate(lane.spans):
            about = {"operation": span.operation, "axis": span.axis, "purpose": span.purpose}
            event = {"name": span.name, "cat": span.kind, **place, "ts": span.begin_us, "args": about}
            if span.kind != "communication":
                events.append({**event, "ph": "X", "dur": span.duration_us})
                continue
            event["id"] = f"{lane.device}.{number}"
            events += [{**event, "ph": "b"}, {**event, "ph": "e", "ts": span.end_us}]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})
