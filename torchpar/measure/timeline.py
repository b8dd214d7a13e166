"""The timeline of a profiled step: PyTorch's traces of all ranks, on one clock.

torch.profiler also records C++ threads: gloo's collectives until they are complete, the collectives that DDP
begins, and the kernels of a GPU. Marks in the trace assign them to a phase, a task or a collective. While one
step is watched, the calls of the loop, the schedules and the collectives are marked.
"""

import tempfile
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.profiler import ProfilerActivity, profile, record_function

from compare.contract.record import Recorder
from compare.contract.timeline import Kind, Lane, Span, Timeline, profiled_step
from compare.pipeline.schedules import Kind as Tasks
from compare.pipeline.schedules import Task
from compare.side.recording import Observer
from compare.spec.axes import PP
from torchpar.comm.collectives import Call, observers
from torchpar.launch import Rank
from torchpar.measure.ledger import LedgerSink
from torchpar.measure.spans import STEP, WAIT, read_trace, span_of
from torchpar.measure.watch import around_calls, around_tasks
from torchpar.run import Run

CPU_METHOD = (
    "torch.profiler on every rank, with the clock of the machine. Forward, backward and update are "
    "the host's time in them, less its waits. A collective lasts from when gloo begins it until it is "
    "complete, with the wait for a slower rank; a message between stages, while its rank waits for it."
)
GPU_METHOD = (
    "torch.profiler on every rank: kernels and copies on the GPU, by the phase that launched them; kernels "
    "less than 5 us apart are one. A collective is NCCL's kernel, which also waits for a slower rank."
)
PHASES: dict[str, Kind] = {
    "forward": "forward",
    "backward": "backward",
    "synchronisation": "backward",
    "optimizer": "update",
}
"""The timeline's phases, by the phases of `Rank.at`."""
TITLES: dict[Tasks, tuple[Kind, str]] = {
    Tasks.FORWARD: ("forward", "forward"),
    Tasks.BACKWARD: ("backward", "backward"),
    Tasks.BACKWARD_INPUT: ("backward", "input gradients"),
    Tasks.BACKWARD_WEIGHT: ("backward", "weight gradients"),
}


class StepProfiler(Observer):
    """Profiles one step; rank 0 writes timeline.json. The axes of PyTorch's collectives are the ledger's."""

    def __init__(self, run: Run, recorder: Recorder | None, ledger: LedgerSink, *, instrumented: int):
        self._run, self._recorder, self._ledger = run, recorder, ledger
        first, steps = run.request.first_step, run.request.steps
        self.watched = profiled_step(first, steps, instrumented)

    @contextmanager
    def watch(self) -> Generator[None]:
        """Entered by all ranks together."""
        run, world, marks = self._run, self._run.mesh.world, Marks(self._run)
        on_gpu = run.mesh.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=activities) as profiler:
            world.all_gather_objects(None)  # the ranks begin the step together
            with marks.mark_calls():
                yield
                if on_gpu:
                    torch.cuda.synchronize(run.mesh.device)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            calls = self._ledger.library_calls
            trace = read_trace(path.read_bytes(), marks.spans, on_gpu=on_gpu, library_calls=calls)
        traces = world.all_gather_objects(trace)
        if not self._recorder:
            return
        begin = min((span.begin_us for trace in traces for span in trace.spans), default=0.0)
        lanes = []
        for device, trace in enumerate(traces):
            spans = [replace(span, begin_us=span.begin_us - begin) for span in trace.spans]
            lanes.append(Lane(device=device, spans=sorted(spans, key=lambda span: span.begin_us)))
        wall_us = max(trace.wall_us for trace in traces)
        problems = dict.fromkeys(trace.problem for trace in traces if trace.problem)
        method = " ".join((GPU_METHOD if on_gpu else CPU_METHOD, *problems))
        self._recorder.leave(Timeline(step=self.watched, wall_us=wall_us, lanes=lanes, method=method))


class Marks:
    """Marks in the trace of a step, and their `spans` without times."""

    def __init__(self, run: Run):
        self.spans = dict[str, Span]()
        self._run, self._passes = run, 0
        self._phase = ExitStack()

    @contextmanager
    def mark_calls(self) -> Generator[None]:
        """Mark the calls inside the context."""
        original_at = Rank.at

        def at(rank: Rank, step: int, phase: str) -> None:
            original_at(rank, step, phase)
            self._enter_phase(phase)

        def loss(schedule: Any, stage: Any, output: Any, targets: Any, microbatch: int, *_: Any) -> Any:
            task = Task(Tasks.FORWARD, stage.stage_index, microbatch)
            return self._around_task(task, "loss") if stage.is_last else nullcontext()

        with ExitStack() as stack:
            stack.enter_context(record_function(STEP))
            observers.append(self._around_call)
            stack.callback(observers.remove, self._around_call)
            stack.callback(self._phase.close)
            stack.enter_context(patch.object(Rank, "at", at))
            stack.enter_context(around_calls(dist.Work, "wait", lambda *_: record_function(WAIT)))
            if self._run.engine.run_pipeline:
                stack.enter_context(around_tasks(self._around_task))
                stack.enter_context(around_calls(_PipelineSchedule, "_maybe_compute_loss", loss))
            yield

    def _around_call(self, call: Call, full: torch.Tensor, ranks: int) -> AbstractContextManager:
        return self._mark(span_of(call))

    def _mark(self, span: Span) -> record_function:
        title = f"shardpair {len(self.spans)}"
        self.spans[title] = span
        return record_function(title)

    def _around_task(self, task: Task, name: str = "") -> AbstractContextManager:
        kind, usual = TITLES[task.kind]
        chunk, title = task.stage // self._run.mesh[PP].size, f"{name or usual} {task.microbatch}"
        span = Span(kind=kind, name=title, microbatch=task.microbatch, chunk=chunk, begin_us=0, duration_us=0)
        return self._mark(span)

    def _enter_phase(self, phase: str) -> None:
        """Begin a phase, which lasts until the next one."""
        self._phase.close()
        self._passes += phase == "forward"
        # The tasks of a pipeline are its forwards and backwards.
        if phase in PHASES and not (self._run.engine.run_pipeline and phase == "forward"):
            many = self._run.experiment.train.gradient_accumulation_steps > 1
            of_pass = f", pass {self._passes}" if many and phase in ("forward", "backward") else ""
            span = Span(kind=PHASES[phase], name=phase + of_pass, begin_us=0, duration_us=0)
            self._phase.enter_context(self._mark(span))
