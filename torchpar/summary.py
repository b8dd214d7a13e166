"""The manifest: how a run was made, and what it cost all ranks."""

import torch

from compare.contract.observers import Observer, Steps
from compare.contract.record import ON_HOST, Manifest, Recorder
from compare.contract.timing import merged
from compare.host.facts import cpu_seconds, versions
from compare.numerics.parameters import parameter_count
from torchpar.comm.devices import PACKAGES, device_kind
from torchpar.measure.instruments import Instruments
from torchpar.measure.memory import CPU_METHOD, GPU_METHOD, resident_bytes
from torchpar.offload import host_tensors
from torchpar.state import Run


class Summary(Observer):
    """Writes manifest.json, after all others have written theirs.

    Args:
        run: this rank's.
        recorder: writes; None on all ranks but the first.
        steps, instruments: have the times and the memory.
        started_utc: when this rank began.
    """

    def __init__(
        self, run: Run, recorder: Recorder | None, steps: Steps, instruments: Instruments, started_utc: str
    ):
        self._run, self._recorder, self._started_utc = run, recorder, started_utc
        self._steps, self._instruments = steps, instruments

    def finish(self) -> None:
        """Put the ranks' costs together, and complete the record."""
        run, steps = self._run, self._steps
        request, experiment = run.request, run.experiment
        costs = (cpu_seconds(), self._resident(), steps.windows)
        cpu, residents, windows = zip(*run.mesh.world.all_gather_objects(costs), strict=True)
        if not self._recorder:
            return
        manifest = Manifest(
            engine=request.engine,
            experiment=experiment,
            platform=request.platform,
            devices=experiment.layout.devices,
            device_kind=device_kind(run.mesh.device),
            parameters=parameter_count(experiment.model),
            initial_weights_sha256=run.initial_weights_sha256,
            corpus_sha256=run.corpus.sha256,
            versions=versions(PACKAGES),
            threads=f"{torch.get_num_threads()} per rank",
            started_utc=self._started_utc,
            compile_s=0.0,
            first_step_s=steps.first_step_s,
            cpu_time_s=sum(cpu) + run.rank.launcher_cpu_s,
            peak_memory_bytes=[one.allocator_peak or one.peak.total for one in self._instruments.memories],
            peak_memory_method=CPU_METHOD if run.mesh.device.type == "cpu" else GPU_METHOD,
            resident_bytes={kind: [resident[kind] for resident in residents] for kind in residents[0]},
            windows=[merged(parts) for parts in zip(*windows, strict=True)],
        )
        self._recorder.finish(manifest)

    def _resident(self) -> dict[str, int]:
        """Bytes that this rank keeps between two steps; gradients as they were just before the optimizer."""
        parallel = self._run.parallel
        held = {
            "parameters": resident_bytes([*parallel.module.parameters(), *parallel.parameters.values()]),
            "gradients": self._instruments.gradient_bytes,
            "optimizer": resident_bytes(parallel.optimizer_state()),
        }
        if self._run.experiment.layout.offload != "none":
            held[ON_HOST] = resident_bytes(host_tensors(parallel.optimizer))
        return held
