"""One rank's trace, as torch.profiler writes it, read into spans.

On a CPU compute is the host's time in a mark less its waits, and a collective what gloo noted of it. On a GPU
both are kernels, which belong to the mark in which they were launched.
"""

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct

from compare.contract.timeline import COMPUTE, Span
from compare.spec.axes import PP
from torchpar.comm.collectives import Call
from torchpar.measure.ledger import KINDS, SILENT
from torchpar.measure.marks import TraceMark, call_name

GLOO, NCCL = "gloo:", "nccl"
WAIT_OPERATOR = "_c10d_functional::wait_tensor"
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
APART_US = 5.0
"""Kernels closer than this are one span: a GPU takes as long from one to the next."""
PERMUTE = "permute"
MESSAGES = {"c10d::send": "gloo:send", "c10d::recv_": "gloo:recv"}
RECEIVE = "receive"
DDP, AUTOGRAD = "DistributedDataParallel.forward", "autograd::engine::evaluate_function"
STEP = str(TraceMark(what="step"))
OPERATORS = ("c10d::", "_c10d_functional::")
UNSEEN = SILENT - {"recv", "recvanysource"}


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

    @property
    def end(self) -> float:
        """When it was over."""
        return self.ts + self.dur


class _Trace(Struct):
    traceEvents: list[Event]
    baseTimeNanoseconds: int = 0


class RankTrace(NamedTuple):
    """Spans of one rank in the step; times in microseconds of the machine's clock."""

    begin_us: float
    end_us: float
    spans: list[Span]
    problem: str = ""
    """Fault of the timeline in words; '' for none."""


class Marked(NamedTuple):
    """A range with its mark."""

    mark: TraceMark
    begin: float
    end: float


def read_trace(content: bytes, *, on_gpu: bool, library_calls: Sequence[Call]) -> RankTrace:
    """Read a trace with one marked step in it.

    Args:
        content: JSON, of `profile.export_chrome_trace`.
        on_gpu: whether kernels are looked at, or the host.
        library_calls: see `timeline.watch`.
    """
    trace = msgspec.json.decode(content, type=_Trace)
    base = trace.baseTimeNanoseconds / 1e3
    events = [event for event in trace.traceEvents if event.ph == "X"]
    for event in events:
        event.ts += base
    events.sort(key=lambda event: event.ts)
    begun = next(place for place, event in enumerate(events) if event.name.startswith(STEP))
    events = events[begun:]  # before it the ranks meet
    marks = [
        Marked(mark, event.ts, event.end)
        for event in events
        if event.cat != "gpu_user_annotation" and (mark := TraceMark.parse(event.name))
    ]
    step = next(one for one in marks if one.mark.what == "step")
    calls, problem = find_calls(events, marks, library_calls)
    if on_gpu:
        return RankTrace(step.begin, step.end, list(_kernels(events, marks, calls)), problem)
    transfers, unmatched = _transfers(events, calls)
    spans = list(_of_the_host(events, marks, zip(calls, transfers, strict=True)))
    return RankTrace(step.begin, step.end, spans, " ".join(filter(None, (problem, unmatched))))


def find_calls(
    events: Sequence[Event], marks: Sequence[Marked], library_calls: Sequence[Call]
) -> tuple[list[Marked], str]:
    """Ranges in which collectives are called: ours by their marks, others by PyTorch's operators.

    Returns:
        The calls in their order, and what could not be told of them.
    """
    ours = [one for one in marks if one.mark.what == "communication"]
    operators = [
        Marked(_mark_of(event.name), event.ts, event.end)
        for event in events
        if event.name.startswith(OPERATORS) and _bare(event.name) not in UNSEEN
    ]
    others = [one for one in outermost([*ours, *operators]) if one not in ours]
    counted = [one for one in others if one.mark.name != RECEIVE]
    agree = [one.mark.operation for one in counted] == [call.kind for call in library_calls]
    named = iter(library_calls if agree else ())
    for place, one in enumerate(others):
        if one.mark.name != RECEIVE and (call := next(named, None)):
            mark = msgspec.structs.replace(
                one.mark, name=call_name(call), axis=call.axis, purpose=call.purpose
            )
            others[place] = one._replace(mark=mark)
    problem = "" if agree else "The axes of the library's collectives could not be told."
    return sorted([*ours, *others], key=lambda one: one.begin), problem


def _of_the_host(
    events: Sequence[Event], marks: Sequence[Marked], calls: Iterable[tuple[Marked, list[Event]]]
) -> Iterator[Span]:
    """Spans of a CPU rank, given what gloo did of each call."""
    waits = [(one.begin, one.end) for one in marks if one.mark.what == "wait"]
    waits += [(event.ts, event.end) for event in events if event.name == WAIT_OPERATOR]
    for call, transfers in calls:
        if call.mark.operation == PERMUTE:
            yield from _messages(call, transfers, waits)
        elif transfers:  # else it is of one rank
            end = max(transfer.end for transfer in transfers)
            yield _span(call.mark, min(transfer.ts for transfer in transfers), end)
    tasks = outermost([one for one in marks if one.mark.what in COMPUTE])
    waits += _waits_of_ddp(events, tasks)
    for task in tasks:
        for begin, end in without((task.begin, task.end), waits):
            yield _span(task.mark, begin, end)


def _waits_of_ddp(events: Sequence[Event], tasks: Iterable[Marked]) -> Iterator[tuple[float, float]]:
    """DDP waits for its buckets in C++, where no mark is: after the last of autograd's work in a backward."""
    if not any(event.name == DDP for event in events):
        return
    for task in tasks:
        within = [event for event in events if task.begin <= event.ts <= task.end]
        computed = max((event.end for event in within if event.name.startswith(AUTOGRAD)), default=task.end)
        reduced = max((event.end for event in within if event.name.startswith(GLOO)), default=computed)
        if reduced > computed:
            yield computed, min(reduced, task.end)


def _transfers(events: Sequence[Event], calls: Sequence[Marked]) -> tuple[list[list[Event]], str]:
    """What gloo did of each call: its threads begin in the order in which PyTorch's operators were called.

    Returns:
        Its entries in the trace by call, and what could not be told.
    """
    found: list[list[Event]] = [[] for _ in calls]
    called = [e for e in events if e.name.startswith("c10d::") and _bare(e.name) not in UNSEEN]
    done = [e for e in events if e.name.startswith(GLOO)]
    agree = True
    for operator, title in (*MESSAGES.items(), ("", "")):  # messages are begun where they are called
        of_kind = [e for e in called if (e.name == operator if operator else e.name not in MESSAGES)]
        begun = [e for e in done if (e.name == title if title else e.name not in MESSAGES.values())]
        agree = agree and len(of_kind) == len(begun)
        for one, transfer in zip(of_kind, begun, strict=False):
            if (place := _place(calls, one.ts)) >= 0:
                found[place].append(transfer)
    return (
        found,
        "" if agree else "gloo noted other collectives than were called: their times may be mixed up.",
    )


def _messages(
    call: Marked, transfers: Iterable[Event], waits: Sequence[tuple[float, float]]
) -> Iterator[Span]:
    """A message between two stages: its call, and the wait in which gloo noted its end."""
    yield _span(call.mark, call.begin, call.end)
    for transfer in transfers:
        for begin, end in waits:
            if begin <= transfer.end <= end:
                yield _span(call.mark, begin, transfer.end)


def _kernels(events: Sequence[Event], marks: Sequence[Marked], calls: Sequence[Marked]) -> Iterator[Span]:
    """Spans of a GPU: kernels that follow each other closely are one."""
    launches = {event.args.correlation: event.ts for event in events if event.cat in LAUNCHES}
    tasks = outermost([one for one in marks if one.mark.what in COMPUTE])
    open_spans: dict[TraceMark, tuple[float, float]] = {}
    for event in events:
        if event.cat not in GPU_WORK or (launched := launches.get(event.args.correlation)) is None:
            continue
        among = calls if event.name.startswith(NCCL) else tasks
        place = _place(among, launched)
        if place < 0:
            continue
        mark = among[place].mark
        begin, end = open_spans.get(mark, (event.ts, event.ts))
        if event.ts - end > APART_US:
            yield _span(mark, begin, end)
            begin = event.ts
        open_spans[mark] = (begin, max(end, event.end))
    yield from (_span(mark, begin, end) for mark, (begin, end) in open_spans.items())


def outermost(ranges: Iterable[Marked]) -> list[Marked]:
    """Ranges outside of all others, in their order."""
    found: list[Marked] = []
    for one in sorted(ranges, key=lambda one: (one.begin, -one.end)):
        if not found or one.begin >= found[-1].end:
            found.append(one)
    return found


def without(
    whole: tuple[float, float], holes: Iterable[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """Rest of an interval without the others."""
    begin, end = whole
    for hole_begin, hole_end in sorted(holes):
        if hole_end <= begin or hole_begin >= end:
            continue
        if hole_begin > begin:
            yield begin, hole_begin
        begin = hole_end
    if begin < end:
        yield begin, end


def _place(ranges: Sequence[Marked], time: float) -> int:
    """Index of the range, among disjoint ones, that holds a time; -1 for none."""
    place = bisect.bisect_right(ranges, time, key=lambda one: one.begin) - 1
    return place if place >= 0 and time <= ranges[place].end else -1


def _bare(operator: str) -> str:
    """An operator's name as the ledger knows it: c10d::allreduce_ -> allreduce."""
    return operator.split("::")[1].replace("_", "")


def _mark_of(operator: str) -> TraceMark:
    name = _bare(operator)
    if name in ("recv", "recvanysource"):  # its sender counts the message
        return TraceMark(what="communication", name=RECEIVE, operation=PERMUTE, axis=PP)
    kind = KINDS.get(name, name)
    return TraceMark(what="communication", name=kind, operation=kind)


def _span(mark: TraceMark, begin: float, end: float) -> Span:
    assert mark.what not in ("step", "wait")
    return Span(
        kind=mark.what,
        name=mark.name,
        begin_us=begin,
        duration_us=end - begin,
        microbatch=mark.microbatch,
        chunk=mark.chunk,
        operation=mark.operation,
        axis=mark.axis,
        purpose=mark.purpose,
    )
