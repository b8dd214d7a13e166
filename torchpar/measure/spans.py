"""The spans of one rank, from the trace that torch.profiler writes.

On a CPU compute is the host's time in a mark without its waits, and a collective is gloo's entry. On a GPU
both are kernels, which belong to the mark in which they were launched.
"""

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from compare.contract.timeline import COMPUTE, Span
from compare.spec.axes import PP
from torchpar.comm.collectives import Call
from torchpar.measure.ledger import SILENT, kind_of

STEP, WAIT = "shardpair step", "shardpair wait"
"""Marks around the step, and around each wait for a collective."""
WAITS = (WAIT, "_c10d_functional::wait_tensor")
GLOO, NCCL = "gloo:", "nccl"
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
APART_US = 5.0
"""Kernels that are closer are one span: a GPU needs this time between two kernels."""
PERMUTE = "permute"
MESSAGES = {"c10d::send": "gloo:send", "c10d::recv_": "gloo:recv"}
RECEIVES = {"recv", "recvanysource"}
DDP, AUTOGRAD = "DistributedDataParallel.forward", "autograd::engine::evaluate_function"
OPERATORS = ("c10d::", "_c10d_functional::")


class _Arguments(Struct):
    correlation: int = -1


class Event(Struct):
    """An entry of a trace; times in microseconds."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: _Arguments = msgspec.field(default_factory=_Arguments)
    span: Span | None = None
    """The span, without times, of a mark or of a collective's operator."""

    @property
    def end(self) -> float:
        return self.ts + self.dur

    @property
    def operator(self) -> str:
        """A collective's name as in `ledger.KINDS`: c10d::allreduce_ -> allreduce; '' for other events."""
        bare = self.name.split("::")[1].replace("_", "") if self.name.startswith(OPERATORS) else ""
        return "" if bare in SILENT - RECEIVES else bare

    def timed(self, begin: float, end: float) -> Span:
        """The span with these times."""
        assert self.span
        return replace(self.span, begin_us=begin, duration_us=end - begin)


class _Trace(Struct):
    traceEvents: list[Event]
    baseTimeNanoseconds: int = 0


class RankTrace(NamedTuple):
    """The spans of one rank, by the clock of the machine, the time of the step, and a problem in words."""

    spans: list[Span]
    wall_us: float
    problem: str = ""


def span_of(call: Call, name: str = "") -> Span:
    """The span of a collective, without times."""
    kind, axis, purpose = call
    name = name or (f"{kind} of {purpose}" if purpose else kind)
    span = Span(kind="communication", name=name, begin_us=0.0, duration_us=0.0)
    return replace(span, operation=kind, axis=axis, purpose=purpose)


def read_trace(
    content: bytes, marks: Mapping[str, Span], *, on_gpu: bool, library_calls: Sequence[Call]
) -> RankTrace:
    """Read a trace with one marked step, JSON of `profile.export_chrome_trace`.

    `marks` are spans without times, by the names of their ranges. `library_calls` are those of the ledger.
    """
    trace = msgspec.json.decode(content, type=_Trace)
    events = sorted((event for event in trace.traceEvents if event.ph == "X"), key=lambda event: event.ts)
    for event in events:
        event.ts += trace.baseTimeNanoseconds / 1e3
        event.span = marks.get(event.name) if event.cat != "gpu_user_annotation" else None
    begun = next(place for place, event in enumerate(events) if event.name == STEP)
    step, events = events[begun], events[begun:]  # before the step the ranks meet
    calls, problem = find_calls(events, library_calls)
    tasks = outermost(event for event in events if event.span and event.span.kind in COMPUTE)
    if on_gpu:
        return RankTrace(list(_kernels(events, tasks, calls)), step.dur, problem)
    transfers, unmatched = _transfers(events, calls)
    spans = list(_host_spans(events, tasks, zip(calls, transfers, strict=True)))
    return RankTrace(spans, step.dur, " ".join(filter(None, (problem, unmatched))))


def find_calls(events: Sequence[Event], library_calls: Sequence[Call]) -> tuple[list[Event], str]:
    """Calls of collectives in order, torchpar's by marks, others by operators; and a problem."""
    ours = [event for event in events if event.span and event.span.kind == "communication"]
    operators = [event for event in events if event.operator]
    others = [event for event in outermost([*ours, *operators]) if not event.span]
    counted = [event for event in others if event.operator not in RECEIVES]
    kinds = [kind_of(event.operator) for event in counted]
    agree = kinds == [call.kind for call in library_calls]
    named = library_calls if agree else [Call(kind, "", "") for kind in kinds]
    for event, call in zip(counted, named, strict=True):
        event.span = span_of(call)
    for event in others:
        event.span = event.span or span_of(
            Call(PERMUTE, PP, ""), "receive"
        )  # the ledger counts it at its sender
    problem = "" if agree else "The axes of the library's collectives are unknown."
    return sorted([*ours, *others], key=lambda event: event.ts), problem


def _host_spans(
    events: Sequence[Event], tasks: Sequence[Event], calls: Iterable[tuple[Event, list[Event]]]
) -> Iterator[Span]:
    """The spans of a CPU rank, from the calls and gloo's entries of each call."""
    waits = [(event.ts, event.end) for event in events if event.name in WAITS]
    for call, transfers in calls:
        assert call.span
        if call.span.operation == PERMUTE:
            # A message between two stages: its call, and the wait in which gloo finished it.
            yield call.timed(call.ts, call.end)
            for transfer in transfers:
                for begin, end in waits:
                    if begin <= transfer.end <= end:
                        yield call.timed(begin, transfer.end)
        elif transfers:  # a collective of one rank has none
            end = max(transfer.end for transfer in transfers)
            yield call.timed(min(transfer.ts for transfer in transfers), end)
    if any(event.name == DDP for event in events):
        waits += _ddp_waits(events, tasks)
    for task in tasks:
        for begin, end in without((task.ts, task.end), waits):
            yield task.timed(begin, end)


def _ddp_waits(events: Sequence[Event], tasks: Iterable[Event]) -> Iterator[tuple[float, float]]:
    """DDP's waits for its buckets, in C++ without marks: after autograd's last work in a backward."""
    for task in tasks:
        within = [event for event in events if task.ts <= event.ts <= task.end]
        computed = max((event.end for event in within if event.name.startswith(AUTOGRAD)), default=task.end)
        reduced = max((event.end for event in within if event.name.startswith(GLOO)), default=computed)
        if reduced > computed:
            yield computed, min(reduced, task.end)


def _transfers(events: Sequence[Event], calls: Sequence[Event]) -> tuple[list[list[Event]], str]:
    """gloo's entries by call, in the order of PyTorch's operators; and a problem."""
    transfers: list[list[Event]] = [[] for _ in calls]
    called = [event for event in events if event.name.startswith("c10d::") and event.operator]
    done, problem = [event for event in events if event.name.startswith(GLOO)], ""
    for operator, title in (*MESSAGES.items(), ("", "")):  # gloo runs messages apart from other collectives
        of_kind = [e for e in called if (e.name == operator if operator else e.name not in MESSAGES)]
        begun = [e for e in done if (e.name == title if title else e.name not in MESSAGES.values())]
        if len(of_kind) != len(begun):
            problem = "gloo noted other collectives than were called: their times may be mixed up."
        for event, transfer in zip(of_kind, begun, strict=False):
            if (place := _place(calls, event.ts)) >= 0:
                transfers[place].append(transfer)
    return transfers, problem


def _kernels(events: Sequence[Event], tasks: Sequence[Event], calls: Sequence[Event]) -> Iterator[Span]:
    """The spans of a GPU. Kernels that follow each other closely are one span."""
    launches = {event.args.correlation: event.ts for event in events if event.cat in LAUNCHES}
    open_spans: dict[Span, tuple[Event, float, float]] = {}
    for event in events:
        if event.cat not in GPU_WORK or (launched := launches.get(event.args.correlation)) is None:
            continue
        among = calls if event.name.startswith(NCCL) else tasks
        if (place := _place(among, launched)) < 0:
            continue
        mark = among[place]
        assert mark.span
        _, begin, end = open_spans.get(mark.span, (mark, event.ts, event.ts))
        if event.ts - end > APART_US:
            yield mark.timed(begin, end)
            begin = event.ts
        open_spans[mark.span] = (mark, begin, max(end, event.end))
    yield from (mark.timed(begin, end) for mark, begin, end in open_spans.values())


def outermost(ranges: Iterable[Event]) -> list[Event]:
    """The ranges that are inside of no other, in order."""
    outer: list[Event] = []
    for event in sorted(ranges, key=lambda event: (event.ts, -event.end)):
        if not outer or event.ts >= outer[-1].end:
            outer.append(event)
    return outer


def without(
    interval: tuple[float, float], holes: Iterable[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """The rest of an interval outside of the holes."""
    begin, end = interval
    for hole_begin, hole_end in sorted(holes):
        if hole_end > begin and hole_begin < end:
            if hole_begin > begin:
                yield begin, hole_begin
            begin = hole_end
    if begin < end:
        yield begin, end


def _place(ranges: Sequence[Event], time: float) -> int:
    """The index of the range that contains a time, among disjoint ranges; -1 for none."""
    place = bisect.bisect_right(ranges, time, key=lambda event: event.ts) - 1
    return place if place >= 0 and time <= ranges[place].end else -1
