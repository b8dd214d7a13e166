"""One rank's run as data, and the record that it leaves (rank 0 writes; the others hand over)."""

import importlib.metadata
import platform
import resource
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from compare.contract.communication import Communication
from compare.contract.data import Corpus
from compare.contract.engines import ENGINES
from compare.contract.experiment import Experiment
from compare.contract.parameters import parameter_count
from compare.contract.record import Manifest, Recorder, Request, Rung
from compare.contract.stream import OwnBatches
from torchpar.comm.mesh import Mesh
from torchpar.comm.rank import Rank
from torchpar.measure.ledger import of_the_busiest
from torchpar.measure.memory import CPU_METHOD, GPU_METHOD, resident_bytes
from torchpar.parallel_model import Named, Plan
from torchpar.remat import resolve_remat
from torchpar.weights import moment_keys, to_arrays

_MOMENT_RUNGS = {"m": Rung.FIRST_M, "v": Rung.FIRST_V}
PACKAGES = ("torch", "numpy")


@dataclass
class Run:
    """Everything that one rank trains with, and what it found out on the way."""

    request: Request
    mesh: Mesh
    rank: Rank
    corpus: Corpus | OwnBatches
    plan: Plan
    started_utc: str
    initial_weights_sha256: str
    ledger: list[Communication] = field(default_factory=list)
    peak_bytes: int = 0
    gradient_bytes: int = 0
    first_step_s: float = 0.0

    @property
    def experiment(self) -> Experiment:
        """What is trained."""
        return self.request.experiment

    def leave(self, recorder: Recorder | None, rung: Rung, pieces: Named) -> None:
        """Put every rank's pieces of weights, gradients or moments together, and record them on rank 0."""
        with self.mesh.traffic.paused():
            full = self.plan.full(pieces)
        if recorder:
            recorder.tensors(rung, to_arrays(full, self.experiment.model))


def record_start(run: Run, recorder: Recorder | None, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Leave the first batch, put together again from what each rank received, and the initial weights."""
    shares = run.mesh.data.all_gather_objects([tensor.cpu().numpy() for tensor in batch])
    inputs, targets = (np.concatenate(parts, axis=1) for parts in zip(*shares, strict=True))
    if recorder:
        recorder.tensors(Rung.BATCH, {"inputs": inputs.astype(np.int32), "targets": targets.astype(np.int32)})
    run.leave(recorder, Rung.INITIAL_WEIGHTS, run.plan.weights())


def record_gradients(run: Run, recorder: Recorder | None) -> None:
    """Leave the gradients as they are before clipping."""
    run.leave(recorder, Rung.GRADIENTS, run.plan.gradients())


def record_after(run: Run, recorder: Recorder | None, step: int) -> None:
    """Leave weights and moments after step `step`, where the ladder asks for them."""
    if step == 0:
        run.leave(recorder, Rung.FIRST_WEIGHTS, run.plan.weights())
        for name, key in moment_keys(run.experiment.optimizer).items():
            run.leave(recorder, _MOMENT_RUNGS[name], run.plan.moments(key))
    if step + 1 == run.request.later_step:
        run.leave(recorder, Rung.LATER_WEIGHTS, run.plan.weights())


def finish(run: Run, recorder: Recorder | None) -> None:
    """Put the ranks' costs together and complete the record."""
    cost = (run.peak_bytes, _cpu_seconds(), _resident(run), run.ledger)
    peaks, cpu_seconds, residents, ledgers = zip(*run.mesh.world.all_gather_objects(cost), strict=True)
    if not recorder:
        return
    request, experiment = run.request, run.experiment
    manifest = Manifest(
        engine=request.engine,
        experiment=experiment,
        platform=request.platform,
        devices=experiment.layout.devices,
        device_kind=device_kind(run.mesh.device),
        gradient_sync=ENGINES[request.engine].gradient_sync_for(experiment.layout),
        remat=resolve_remat(experiment.layout),
        parameters=parameter_count(experiment.model),
        initial_weights_sha256=run.initial_weights_sha256,
        corpus_sha256=run.corpus.sha256,
        versions=versions(),
        threads="1 per rank",
        started_utc=run.started_utc,
        compile_s=0.0,
        first_step_s=run.first_step_s,
        cpu_time_s=sum(cpu_seconds) + run.rank.launcher_cpu_s,
        peak_memory_bytes=list(peaks),
        peak_memory_method=CPU_METHOD if run.mesh.device.type == "cpu" else GPU_METHOD,
        resident_bytes={kind: [resident[kind] for resident in residents] for kind in residents[0]},
    )
    recorder.finish(manifest, of_the_busiest(ledgers))


def _resident(run: Run) -> dict[str, int]:
    """Bytes that this rank keeps between two steps; gradients as they were just before the optimizer."""
    plan = run.plan
    state = [t for entry in plan.optimizer.state.values() for t in entry.values() if torch.is_tensor(t)]
    return {
        "parameters": resident_bytes([*plan.module.parameters(), *plan.parameters.values()]),
        "gradients": run.gradient_bytes,
        "optimizer": resident_bytes(state),
    }


def versions() -> dict[str, str]:
    """Python's and the packages' versions."""
    packages = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **packages}


def device_kind(device: torch.device) -> str:
    """The model of the GPU, or of the CPU as far as the system tells."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
