"""Figures of the watched step and of pipeline schedules, and the trace for Perfetto."""

import statistics
from collections.abc import Mapping

import msgspec

from compare.contract.record import Record
from compare.contract.timeline import Timeline, exposed_us, idle_us
from compare.pipeline.schedules import Kind, make_schedule
from compare.pipeline.simulator import bubble_fraction, makespan, peak_in_flight
from compare.pipeline.simulator import run as simulate
from compare.show.figures import WIDE, Axes, Box, Figure, gantt
from compare.text import SCHEDULES

MOST_BOXES = 1500
"""Largest number of boxes in a figure of a schedule."""
NUMBERS = "Numbers are microbatches. XLA's events name no iteration of a loop: lanes of JAX have no numbers."
TASKS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, input",
    Kind.BACKWARD_WEIGHT: "backward, weights",
}


def timeline_figures(records: Mapping[str, Record]) -> list[Figure]:
    """The watched step of all records that have a timeline, and each pipeline schedule that ran, once."""
    return [*measured_figures(records), *planned_figures(records)]


def planned_figures(records: Mapping[str, Record]) -> list[Figure]:
    """Each pipeline schedule of the records, once, without those that have too many boxes to read."""
    plans = dict.fromkeys(
        (layout.schedule, layout.pp, layout.microbatches * passes, layout.chunks)
        for experiment in (record.manifest.experiment for record in records.values())
        for layout, passes in [(experiment.layout, experiment.train.gradient_accumulation_steps)]
        if layout.pp > 1
    )
    return [figure for plan in plans if (figure := schedule_figure(*plan))]


def measured_figures(records: Mapping[str, Record]) -> list[Figure]:
    """The watched step of all records that have a timeline, one under the other on one scale."""
    timelines = {name: record.timeline for name, record in records.items() if record.timeline}
    if not timelines:
        return []
    rows, boxes, heads = list[str](), list[Box](), dict[int, str]()
    methods: dict[str, list[str]] = {}
    for name, timeline in timelines.items():
        heads[len(rows)] = f"{name}: {describe(timeline)}"
        rows += ["", *(f"device {lane.device}" for lane in timeline.lanes)]
        boxes += boxes_of(timeline, len(rows) - len(timeline.lanes))
        methods.setdefault(timeline.method, []).append(name)

    def draw(axes: Axes) -> None:
        gantt(axes, rows, boxes, "ms")
        for row, words in heads.items():
            axes.text(0, row + 0.85, words, va="bottom")

    numbered = any(box.text for box in boxes)
    return [
        Figure(
            title="One step of each engine, measured",
            caption=" ".join(
                [
                    "All on one scale; the times are means over the devices.",
                    *([NUMBERS] if numbered else []),
                    *(f"{', '.join(names)}: {method}" for method, names in methods.items()),
                ]
            ),
            draw=draw,
            width=WIDE,
            height=0.7 + 0.4 * len(rows),
        )
    ]


def describe(timeline: Timeline) -> str:
    """Durations of a step in words: wall time of the slowest device; exposed and idle, means over devices."""
    exposed = statistics.fmean(map(exposed_us, timeline.lanes)) / 1e3
    idle = statistics.fmean(idle_us(lane, timeline.wall_us) for lane in timeline.lanes) / 1e3
    return (
        f"{timeline.wall_us / 1e3:.1f} ms on the slowest device, {exposed:.1f} ms in communication without "
        f"compute at the same time, {idle:.1f} ms idle"
    )


def boxes_of(timeline: Timeline, first: int) -> list[Box]:
    """The boxes of a step, with a row for each device from row `first` on."""
    return [
        Box(
            row,
            span.begin_us / 1e3,
            span.duration_us / 1e3,
            span.kind,
            text=str(span.microbatch) if span.microbatch >= 0 and span.kind != "communication" else "",
            is_pale=bool(span.chunk),
            is_beside=span.kind == "communication",
        )
        for row, lane in enumerate(timeline.lanes, first)
        for span in lane.spans
    ]


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
