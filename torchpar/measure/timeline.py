"""The timeline of a profiled step: PyTorch's trace of every rank, put together on one clock.

torch.profiler sees what C++ threads do, too: gloo's collectives until they are complete, those that DDP
begins, kernels of a GPU. Which phase or microbatch they belong to, `marks` tell.
"""

import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from msgspec.structs import replace
from torch.profiler import ProfilerActivity, profile

from compare.contract.observers import Observer
from compare.contract.record import Recorder
from compare.contract.timeline import Lane, Timeline, profiled_step
from torchpar.measure.instruments import Instruments
from torchpar.measure.marks import marked
from torchpar.measure.trace import RankTrace, read_trace
from torchpar.run import Run

CPU_METHOD = (
    "torch.profiler on every rank, whose clocks are those of one machine. Forward, backward and update are "
    "the host's time in them, less what it waits for a collective; a collective lasts from when gloo begins "
    "it until it is complete, and includes the wait for a slower rank. gloo does not tell when a message has "
    "arrived, only when a rank has waited for it: a message between stages is shown while its rank waits, "
    "and what it waits for the other stage's work cannot be told from the transfer."
)
GPU_METHOD = (
    "torch.profiler on every rank: kernels and copies on the GPU, by the phase that launched them; kernels "
    "less than 5 us apart are one. A collective is NCCL's kernel, which also waits for a slower rank."
)


class StepProfiler(Observer):
    """Watches one step, and writes timeline.json.

    Args:
        run: this rank's.
        recorder: writes; None on all ranks but the first.
        instruments: know the axes of collectives that are not our own, of which a trace tells nothing.
    """

    def __init__(self, run: Run, recorder: Recorder | None, instruments: Instruments):
        self._run, self._recorder, self._ledger = run, recorder, instruments.ledger
        first, steps = run.request.first_step, run.request.steps
        self.watched = profiled_step(first, steps, instruments.watched)

    @contextmanager
    def watch(self) -> Generator[None]:
        """All ranks together, which begin the step together."""
        run, on_gpu = self._run, self._run.mesh.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=activities) as profiler:
            run.mesh.world.all_gather_objects(None)  # who starts his profiler first must not seem to wait
            with marked(run):
                yield
                if on_gpu:
                    torch.cuda.synchronize(run.mesh.device)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            own = read_trace(path.read_bytes(), on_gpu=on_gpu, library_calls=self._ledger.library_calls)
        method = GPU_METHOD if on_gpu else CPU_METHOD
        timeline = put_together(run.mesh.world.all_gather_objects(own), step=self.watched, method=method)
        if self._recorder:
            self._recorder.timeline(timeline)


def put_together(traces: Sequence[RankTrace], *, step: int, method: str) -> Timeline:
    """All ranks' traces as a timeline, in which time begins with the first span."""
    begin = min((span.begin_us for trace in traces for span in trace.spans), default=0.0)
    problems = dict.fromkeys(trace.problem for trace in traces if trace.problem)
    lanes = [
        Lane(
            device=device,
            spans=[
                replace(span, begin_us=span.begin_us - begin)
                for span in sorted(trace.spans, key=lambda span: span.begin_us)
            ],
        )
        for device, trace in enumerate(traces)
    ]
    return Timeline(
        step=step,
        wall_us=max(trace.end_us - trace.begin_us for trace in traces),
        lanes=lanes,
        method=" ".join((method, *problems)),
    )
