"""Timeline of one step, RUN_DIR/timeline.json: the activities of each device on one clock.

Only a profiled run (`Request.profile`) records a timeline, because recording costs time.
"""

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct, field

TIMELINE = "timeline.json"
TRACES = ("trace.json.gz", "trace.xplane.pb")
"""Files of JAX's profiler, stored next to the timeline."""
PROFILED_STEP = 3
"""Profiled step, counted from the run's first step. The first steps are slower, and instruments watch the
third."""

Kind = Literal["forward", "backward", "update", "communication"]
COMPUTE: tuple[Kind, ...] = ("forward", "backward", "update")


class Span(Struct, frozen=True, kw_only=True):
    """One uninterrupted activity of a device."""

    kind: Kind
    name: str
    """Readable name: the microbatch or the operation."""
    begin_us: float
    """Begin after the earliest span of all devices (microseconds)."""
    duration_us: float
    microbatch: int = -1
    """Number of the microbatch; -1 without microbatches, or if it is unknown."""
    chunk: int = 0
    """Number of the rank's stage, with interleaving."""
    operation: str = ""
    """Kind of communication as in the ledger; axis and purpose below likewise, if known."""
    axis: str = ""
    purpose: str = ""

    @property
    def end_us(self) -> float:
        """End of the span (microseconds)."""
        return self.begin_us + self.duration_us


class Lane(Struct, frozen=True, kw_only=True):
    """Spans of one device, ordered by start. Communication may overlap compute."""

    device: int
    """Position in the order of the mesh."""
    spans: list[Span] = field(default_factory=list)


class Timeline(Struct, frozen=True, kw_only=True):
    """One step of all devices, on one clock."""

    step: int
    wall_us: float
    """Duration of the step on the slowest device (microseconds)."""
    lanes: list[Lane] = field(default_factory=list)
    method: str = ""
    """Method of the measurement and its limits, in words."""


def profiled_step(first: int, steps: int, instrumented: int) -> int:
    """Step to profile among `steps` steps from `first`, other than the instrumented step if possible."""
    wanted = first + min(PROFILED_STEP, steps - 1)
    return wanted - 1 if wanted == instrumented and steps > 1 else wanted


def busy_us(lane: Lane, *kinds: Kind) -> float:
    """Time of a device in spans of these kinds; overlapping spans count once."""
    return _covered(span for span in lane.spans if span.kind in kinds)


def exposed_us(lane: Lane) -> float:
    """Time in which a device communicates and computes nothing meanwhile."""
    return busy_us(lane, *COMPUTE, "communication") - busy_us(lane, *COMPUTE)


def idle_us(lane: Lane, wall_us: float) -> float:
    """Time in which a device neither computes nor communicates."""
    return max(0.0, wall_us - busy_us(lane, *COMPUTE, "communication"))


def bubble_fraction(timeline: Timeline) -> float | None:
    """Share of the devices' time in a pipeline in which they wait for each other or for a message.

    Time runs from the first forward on any device to the last backward. None if no span has a microbatch.
    """
    lanes = [
        [span for span in lane.spans if span.microbatch >= 0 and span.kind in COMPUTE]
        for lane in timeline.lanes
    ]
    tasks = [span for own in lanes for span in own]
    if not tasks:
        return None
    length = max(span.end_us for span in tasks) - min(span.begin_us for span in tasks)
    return 1.0 - sum(map(_covered, lanes)) / (len(lanes) * length)


def _covered(spans: Iterable[Span]) -> float:
    """Length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.begin_us):
        total += max(0.0, span.end_us - max(span.begin_us, reached))
        reached = max(reached, span.end_us)
    return total
