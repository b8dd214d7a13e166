"""A timeline as Chrome's trace events, which Perfetto and chrome://tracing open.

A process for each engine and a thread for each device. A thread's events must lie inside of each other or
apart, and collectives overlap with compute and with each other: so they have threads of their own below it.
"""

from collections.abc import Sequence

import msgspec

from compare.contract.timeline import Lane, Span, Timeline

MORE = "communication"


def chrome_trace(name: str, timeline: Timeline, *, process: int = 0) -> bytes:
    """The trace of one engine.

    Args:
        name: of the engine.
        timeline: of its step.
        process: its number among others, if traces are to be put together.
    """
    events = [_metadata("process_name", process, 0, {"name": f"{name}, step {timeline.step}"})]
    found = []
    devices = len(timeline.lanes)
    for lane in timeline.lanes:
        for number, (title, spans) in enumerate(tracks(lane)):
            thread = lane.device + number * devices
            events.append(_metadata("thread_name", process, thread, {"name": title}))
            events.append(_metadata("thread_sort_index", process, thread, {"sort_index": lane.device}))
            found += [_event(span, process, thread) for span in spans]
    found.sort(key=lambda event: event["ts"])
    return msgspec.json.encode({"traceEvents": [*events, *found], "displayTimeUnit": "ms"})


def tracks(lane: Lane) -> list[tuple[str, list[Span]]]:
    """A device's threads with their names: its compute, then its communication without overlap."""
    compute = [span for span in lane.spans if span.kind != MORE]
    apart = without_overlap([span for span in lane.spans if span.kind == MORE])
    titles = [f"device {lane.device}: {MORE}" + (f" {n + 1}" if n else "") for n in range(len(apart))]
    return [(f"device {lane.device}", compute), *zip(titles, apart, strict=True)]


def without_overlap(spans: Sequence[Span]) -> list[list[Span]]:
    """The spans on as few rows as they need, each row without overlap."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.begin_us):
        row = next((row for row in rows if row[-1].end_us <= span.begin_us), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def _event(span: Span, process: int, thread: int) -> dict:
    about = {"operation": span.operation, "axis": span.axis, "purpose": span.purpose}
    arguments: dict[str, object] = {key: value for key, value in about.items() if value}
    if span.microbatch >= 0:
        arguments |= {"microbatch": span.microbatch, "chunk": span.chunk}
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": process,
        "tid": thread,
        "ts": span.begin_us,
        "dur": span.duration_us,
        "args": arguments,
    }


def _metadata(what: str, process: int, thread: int, arguments: dict[str, object]) -> dict:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": arguments}
