"""Spans of handmade traces, of a CPU rank and of a GPU."""

import msgspec

from compare.contract.timeline import Span
from torchpar.comm.collectives import Call
from torchpar.measure.spans import STEP as STEP_NAME
from torchpar.measure.spans import WAIT, read_trace

BASE_NS = 7_000_000_000
MARKS: dict[str, Span] = {}


def mark(kind, name, **fields) -> str:
    """The name of a range that marks this span."""
    title = f"shardpair {len(MARKS)}"
    MARKS[title] = Span(kind=kind, name=name, begin_us=0.0, duration_us=0.0, **fields)
    return title


def event(name, begin, end, cat="cpu_op", correlation=None):
    times = {"ph": "X", "pid": 1, "tid": 1, "ts": begin, "dur": end - begin}
    arguments = {} if correlation is None else {"correlation": correlation, "stream": 7}
    return times | {"cat": cat, "name": str(name), "args": arguments}


def spans_of(*events, on_gpu=False, library_calls=()):
    entries = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}, *events]
    content = msgspec.json.encode({"traceEvents": entries, "baseTimeNanoseconds": BASE_NS})
    return read_trace(content, MARKS, on_gpu=on_gpu, library_calls=library_calls)


def times(spans: list[Span], kind: str):
    """(begin, end) of the spans of a kind, on the trace's own clock."""
    base = BASE_NS / 1e3
    return [(span.begin_us - base, span.end_us - base) for span in spans if span.kind == kind]


STEP = event(STEP_NAME, 0, 1000, "user_annotation")
SUM = {"operation": "all_reduce", "axis": "dp_replicate", "purpose": "gradients"}
GRADIENTS = mark("communication", "all_reduce of gradients", **SUM)


def test_trace_compute_without_waits():
    found = spans_of(
        event("c10d::allgather_", -20, -10),  # before the step: ranks meet
        STEP,
        event(mark("forward", "forward"), 10, 100, "user_annotation"),
        event(mark("backward", "backward"), 100, 400, "user_annotation"),
        event(GRADIENTS, 200, 210, "user_annotation"),
        event("c10d::allreduce_", 202, 208),
        event("gloo:all_reduce", 215, 330, "user_annotation"),
        event(GRADIENTS, 250, 260, "user_annotation"),
        event("c10d::allreduce_", 252, 258),
        event("gloo:all_reduce", 262, 380, "user_annotation"),
        event(WAIT, 300, 330, "user_annotation"),
        event(WAIT, 340, 380, "user_annotation"),
    )
    assert times(found.spans, "forward") == [(10, 100)]
    assert times(found.spans, "backward") == [(100, 300), (330, 340), (380, 400)]
    assert times(found.spans, "communication") == [(215, 330), (262, 380)]
    assert {span.purpose for span in found.spans if span.kind == "communication"} == {"gradients"}
    assert found.wall_us == 1000
    assert not found.problem


def test_trace_names_library_collectives():
    calls = [Call("all_gather", "dp_shard", "parameters"), Call("reduce_scatter", "dp_shard", "gradients")]
    events = (
        STEP,
        event(mark("forward", "forward"), 0, 500, "user_annotation"),
        event("c10d::_allgather_base_", 10, 20),
        event("gloo:all_gather", 12, 40, "user_annotation"),
        event("c10d::_reduce_scatter_base_", 60, 70),
        event("gloo:all_reduce", 62, 90, "user_annotation"),  # gloo's reduce-scatter is an all-reduce
    )
    found = spans_of(*events, library_calls=calls)
    named = [(s.operation, s.axis, s.purpose) for s in found.spans if s.kind == "communication"]
    assert named == [tuple(call) for call in calls]
    assert not found.problem
    other = spans_of(*events, library_calls=calls[:1])
    assert [(s.operation, s.axis) for s in other.spans if s.kind == "communication"] == [
        ("all_gather", ""),
        ("reduce_scatter", ""),
    ]
    assert "are unknown" in other.problem


def test_trace_without_gloo_entry():
    found = spans_of(STEP, event(GRADIENTS, 200, 210, "user_annotation"), event("c10d::allreduce_", 202, 208))
    assert times(found.spans, "communication") == []
    assert "gloo noted other collectives than were called" in found.problem


def test_trace_ddp_waits_after_backward():
    found = spans_of(
        STEP,
        event("DistributedDataParallel.forward", 10, 90, "user_annotation"),
        event(mark("backward", "backward"), 100, 300, "user_annotation"),
        event("autograd::engine::evaluate_function: AddmmBackward0", 100, 180),
        event("c10d::allreduce_", 170, 175),
        event("gloo:all_reduce", 172, 280, "user_annotation"),
        library_calls=[Call("all_reduce", "dp_replicate", "gradients")],
    )
    assert times(found.spans, "backward") == [(100, 180), (280, 300)]
    assert times(found.spans, "communication") == [(172, 280)]


def test_trace_message_while_waiting():
    found = spans_of(
        STEP,
        event("c10d::recv_", 10, 12),
        event("gloo:recv", 11, 90, "user_annotation"),
        event(mark("forward", "forward 0", microbatch=0), 20, 60, "user_annotation"),
        event(WAIT, 70, 91, "user_annotation"),
    )
    assert times(found.spans, "communication") == [(10, 12), (70, 90)]
    (task,) = (span for span in found.spans if span.kind == "forward")
    assert task.microbatch == 0
    assert {span.axis for span in found.spans if span.kind == "communication"} == {"pp"}


def test_trace_kernels_have_launch_phase():
    found = spans_of(
        STEP,
        event(mark("forward", "forward"), 10, 50, "user_annotation"),
        event(mark("forward", "forward"), 300, 400, "gpu_user_annotation"),
        event("cudaLaunchKernel", 20, 22, "cuda_runtime", 1),
        event("cudaLaunchKernel", 24, 26, "cuda_runtime", 2),
        event(mark("backward", "backward"), 50, 90, "user_annotation"),
        event("cudaLaunchKernel", 60, 62, "cuda_runtime", 3),
        event(GRADIENTS, 70, 80, "user_annotation"),
        event("cuLaunchKernelEx", 72, 74, "cuda_driver", 4),
        event("sgemm", 300, 340, "kernel", 1),
        event("gelu", 342, 350, "kernel", 2),  # 2 us later: one span
        event("sgemm", 360, 500, "kernel", 3),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 380, 520, "kernel", 4),
        event("unknown", 600, 610, "kernel", 99),
        on_gpu=True,
    )
    assert times(found.spans, "forward") == [(300, 350)]
    assert times(found.spans, "backward") == [(360, 500)]
    assert times(found.spans, "communication") == [(380, 520)]
    (sent,) = (span for span in found.spans if span.kind == "communication")
    assert (sent.operation, sent.axis, sent.purpose) == ("all_reduce", "dp_replicate", "gradients")
