"""The record of a run, and the instruments for it: an observer that the training loop calls.

All ranks have one, because they put together what each of them has; rank 0 writes.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager

import numpy as np
import torch

from compare.contract.divergence import end_if_diverged
from compare.contract.memory_profile import Class, DeviceMemory, MemoryProfile
from compare.contract.progress import Place
from compare.contract.record import ON_HOST, Manifest, Recorder
from compare.contract.request import Rung
from compare.contract.timeline import profiled_step
from compare.contract.timing import Window, merged
from compare.contract.work import Work
from compare.host.facts import cpu_seconds, versions
from compare.numerics.evaluation import Evaluation
from compare.numerics.parameters import parameter_count
from compare.spec.engines.registry import ENGINES
from torchpar.comm.devices import PACKAGES, device_kind
from torchpar.divergence import first_gradient_not_finite
from torchpar.measure.ledger import LedgerMode, of_all_ranks
from torchpar.measure.memory import (
    CPU_METHOD,
    GPU_METHOD,
    PROFILE_METHOD,
    allocator_peak,
    memory_in_use,
    resident_bytes,
    watch_memory,
)
from torchpar.measure.places import group_names
from torchpar.measure.storages import StorageMode
from torchpar.measure.work import WorkMode
from torchpar.measure.work import of_all_ranks as work_of_all_ranks
from torchpar.offload import host_tensors
from torchpar.parallel_model import TensorsByName
from torchpar.state import Batch, Run
from torchpar.weights import moment_keys, to_arrays

_MOMENT_RUNGS = {"m": Rung.FIRST_M, "v": Rung.FIRST_V}
# DDP sends its bucket order in step 1, once: step 2 is the first that is like all later ones.
INSTRUMENTED_STEP = 2


class Recording:
    """The record of a run, as far as it is known.

    Args:
        run: this rank's.
        recorder: writes; None on all ranks but the first.
        started_utc: when the rank began.
    """

    def __init__(self, run: Run, recorder: Recorder | None, *, started_utc: str):
        self._run, self._recorder, self._started_utc = run, recorder, started_utc
        mesh = run.mesh
        self._ledger_mode = LedgerMode(group_names(mesh), own_calls=mesh.traffic, infers=True)
        self._gradient_bytes = 0
        self._work: Work | None = None
        self._watching: StorageMode | None = None
        self._memory: DeviceMemory | None = None
        self._first_step_s = 0.0
        self._windows: list[Window] = []

    def begin(self, batch: Batch) -> None:
        """For a ladder, before the first step: its batch, put together from all shares, and the weights."""
        run = self._run
        own = [tensor.cpu().numpy() for tensor in batch if tensor is not None]
        shares = run.mesh.data.all_gather_objects(own)
        arrays = (np.concatenate(parts, axis=1).astype(np.int32) for parts in zip(*shares, strict=True))
        named = dict(zip(("inputs", "targets", "keys"), arrays, strict=False))
        if "keys" in named:
            named["keys"] = named["keys"].view(np.uint32)
        if self._recorder:
            self._recorder.tensors(Rung.BATCH, named)
        self._leave(Rung.INITIAL_WEIGHTS, run.parallel.weights())

    @contextmanager
    def watch_step(self) -> Generator[None]:
        """Around a step. One of them is instrumented: its peak memory, and its ledger. Of another one, in a
        profiled run, the timeline is left."""
        with self._timeline(), self._instruments():
            yield

    @contextmanager
    def _timeline(self) -> Generator[None]:
        """Around a step: the timeline of the one that is profiled."""
        if self._run.state.step != self._profiled:
            yield
            return
        from torchpar.measure.timeline import watch  # what it marks is not imported for every run

        with watch(self._run, self._ledger_mode.library_calls) as found:
            yield
        if self._recorder and found.timeline:
            self._recorder.timeline(found.timeline)

    @contextmanager
    def _instruments(self) -> Generator[None]:
        """Around a step: memory and ledger of the one that is instrumented."""
        if self._run.state.step != self._instrumented:
            yield
            return
        mesh, parallel = self._run.mesh, self._run.parallel
        modules = [*parallel.module.parameters(), *parallel.module.buffers()]
        held: dict[Class, Iterable[torch.Tensor]] = {
            "parameters": [*modules, *parallel.parameters.values()],
            "optimizer": parallel.optimizer_state(),
            "gathered parameters": parallel.transient,
        }
        elsewhere = host_tensors(parallel.optimizer)
        watching = watch_memory(mesh.device, held, elsewhere=elsewhere, module=parallel.module)
        work = WorkMode(parallel.module, has_tasks=parallel.run_pipeline is not None)
        with watching as self._watching, self._ledger_mode, work:
            yield
            self._watching.tag("optimizer", parallel.optimizer_state())  # which a first step makes
        self._memory = self._watching.memory(allocator_peak=allocator_peak(mesh.device))
        self._work = work.seen()

    def gradients_are_ready(self) -> None:
        """In the middle of a step: the mean gradients are there, before clipping."""
        run = self._run
        if run.state.step == run.request.first_step and run.request.ladder:
            self._leave(Rung.GRADIENTS, run.parallel.gradients())
        if self._watching and run.state.step == self._instrumented:
            held = run.parallel.held_gradients()
            self._gradient_bytes = resident_bytes(held)
            self._watching.tag("gradients", held)
            self._watching.updates()
            self._ledger_mode.is_updating = True

    def step_is_done(self, loss: torch.Tensor, norm: torch.Tensor, *, seconds: float) -> None:
        """After a step, before the state moves on: its numbers, and the tensors that the ladder asks for.

        Raises:
            DivergedError: the loss or the gradient norm is not finite. They are the same on all ranks, which
                therefore end together.
        """
        run, step = self._run, self._run.state.step
        run.rank.at(step, "record")
        if run.request.silent:  # no rank waits for another but here
            seconds = max(run.mesh.world.all_gather_objects(seconds))
        if step == run.request.first_step:
            self._first_step_s = seconds
        self._note(run.state.place, loss, norm, seconds=seconds)
        if rung := run.request.weights_due_after(step):
            self._leave(rung, run.parallel.weights())
        if run.request.ladder and step == run.request.first_step:
            for name, key in moment_keys(run.experiment.optimizer).items():
                self._leave(_MOMENT_RUNGS[name], run.parallel.moments(key))

    def window_is_done(self, done: list[tuple[Place, torch.Tensor, torch.Tensor]], window: Window) -> None:
        """After a window of steps, when the state has moved on: their numbers.

        Args:
            done: of each where it began, its loss and its norm.
            window: what they cost this rank.

        Raises:
            DivergedError: as `step_is_done`.
        """
        self._windows.append(window)
        for place, loss, norm in done:
            self._note(place, loss, norm, seconds=window.wall_s / window.steps)

    def _note(self, place: Place, loss: torch.Tensor, norm: torch.Tensor, *, seconds: float) -> None:
        run = self._run
        done = place.record(
            run.experiment,
            loss=loss.item(),
            grad_norm=norm.item(),
            seconds=seconds,
            memory=memory_in_use(run.mesh.device),
            instrumented=place.step in (self._instrumented, self._profiled),
        )
        if self._recorder:
            self._recorder.step(done)
        if not run.request.silent:
            end_if_diverged(run.request.engine, done, where=lambda: first_gradient_not_finite(run))

    def evaluated(self, evaluation: Evaluation) -> None:
        """After an evaluation, which has the same losses on all ranks."""
        if self._recorder:
            self._recorder.evaluation(evaluation)

    def finish(self) -> None:
        """After the last step: put the ranks' costs together, and complete the record."""
        run = self._run
        request, experiment = run.request, run.experiment
        assert self._memory, "no step was watched"
        noted = self._ledger_mode.noted()
        cost = (self._memory, cpu_seconds(), self._resident(), noted, self._work, self._windows)
        memories, cpu, residents, ledgers, work, windows = zip(
            *run.mesh.world.all_gather_objects(cost), strict=True
        )
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
            first_step_s=self._first_step_s,
            cpu_time_s=sum(cpu) + run.rank.launcher_cpu_s,
            peak_memory_bytes=[one.allocator_peak or one.peak.total for one in memories],
            peak_memory_method=CPU_METHOD if run.mesh.device.type == "cpu" else GPU_METHOD,
            resident_bytes={kind: [resident[kind] for resident in residents] for kind in residents[0]},
            windows=[merged(parts) for parts in zip(*windows, strict=True)],
        )
        self._recorder.memory(MemoryProfile(devices=list(memories), method=PROFILE_METHOD))
        counts_own, stages = ENGINES[request.engine].counts_own_calls, experiment.layout.pp
        self._recorder.work(work_of_all_ranks(work, stages=stages))
        self._recorder.finish(manifest, of_all_ranks(ledgers, stages=stages, counts_own=counts_own))

    @property
    def _profiled(self) -> int | None:
        """The step whose timeline is left; None in a run that leaves none."""
        request = self._run.request
        if not request.profile:
            return None
        return profiled_step(request.first_step, request.steps, self._instrumented)

    @property
    def _instrumented(self) -> int:
        """The step that is watched."""
        request = self._run.request
        return request.first_step + min(INSTRUMENTED_STEP, request.steps - 1)

    def _leave(self, rung: Rung, pieces: TensorsByName) -> None:
        """Put every rank's pieces of weights, gradients or moments together, and record them on rank 0."""
        with self._run.mesh.traffic.paused():
            full = self._run.parallel.full(pieces)
        if self._recorder:
            self._recorder.tensors(rung, to_arrays(full, self._run.experiment.model))

    def _resident(self) -> dict[str, int]:
        """Bytes that this rank keeps between two steps; gradients as they were just before the optimizer."""
        parallel = self._run.parallel
        held = {
            "parameters": resident_bytes([*parallel.module.parameters(), *parallel.parameters.values()]),
            "gradients": self._gradient_bytes,
            "optimizer": resident_bytes(parallel.optimizer_state()),
        }
        if self._run.experiment.layout.offload != "none":
            held[ON_HOST] = resident_bytes(host_tensors(parallel.optimizer))
        return held
