"""Instruments of one step: its ledger, its memory by class, and what it computes."""

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from compare.contract.memory_profile import Class, DeviceMemory, MemoryProfile
from compare.contract.observers import Observer
from compare.contract.record import Recorder
from compare.contract.work import Work
from compare.spec.engines.registry import ENGINES
from torchpar.measure.ledger import LedgerMode, of_all_ranks
from torchpar.measure.memory import PROFILE_METHOD, allocator_peak, resident_bytes, watch_memory
from torchpar.measure.places import group_names
from torchpar.measure.storages import StorageMode
from torchpar.measure.work import WorkMode
from torchpar.measure.work import of_all_ranks as work_of_all_ranks
from torchpar.offload import host_tensors
from torchpar.state import Run

# DDP sends its bucket order in step 1, once: step 2 is the first that is like all later ones.
INSTRUMENTED_STEP = 2


class Instruments(Observer):
    """Watches one step of a rank, and writes ledger.json, memory.json and work.json.

    Attributes:
        step: the one that is watched.
        ledger: notes its collectives.
        gradient_bytes: of this rank's gradients just before the optimizer.
        memories: of all ranks, in order; after the last step.
    """

    def __init__(self, run: Run, recorder: Recorder | None):
        self._run, self._recorder, request = run, recorder, run.request
        self.step = request.first_step + min(INSTRUMENTED_STEP, request.steps - 1)
        self.ledger = LedgerMode(group_names(run.mesh), own_calls=run.mesh.traffic, infers=True)
        self.gradient_bytes = 0
        self.memories: list[DeviceMemory] = []
        self._watching: StorageMode | None = None
        self._found: tuple[DeviceMemory, Work] | None = None

    def around(self, step: int) -> AbstractContextManager:
        """Watch, if this is the step."""
        return self._watch() if step == self.step else nullcontext()

    @contextmanager
    def _watch(self) -> Generator[None]:
        device, parallel = self._run.mesh.device, self._run.parallel
        modules = [*parallel.module.parameters(), *parallel.module.buffers()]
        held: dict[Class, Iterable[torch.Tensor]] = {
            "parameters": [*modules, *parallel.parameters.values()],
            "optimizer": parallel.optimizer_state(),
            "gathered parameters": parallel.transient,
        }
        elsewhere = host_tensors(parallel.optimizer)
        memory = watch_memory(device, held, elsewhere=elsewhere, module=parallel.module)
        work = WorkMode(parallel.module, has_tasks=parallel.run_pipeline is not None)
        with memory as self._watching, self.ledger, work:
            yield
            self._watching.tag("optimizer", parallel.optimizer_state())  # which a first step makes
        self._found = self._watching.memory(allocator_peak=allocator_peak(device)), work.seen()

    def gradients(self, step: int) -> None:
        """What is allocated from now on is the optimizer's."""
        if self._watching and step == self.step:
            held = self._run.parallel.held_gradients()
            self.gradient_bytes = resident_bytes(held)
            self._watching.tag("gradients", held)
            self._watching.updates()
            self.ledger.is_updating = True

    def finish(self) -> None:
        """Put together what the ranks found."""
        assert self._found, "no step was watched"
        engine, stages = ENGINES[self._run.request.engine], self._run.experiment.layout.pp
        found = self._run.mesh.world.all_gather_objects((*self._found, self.ledger.noted()))
        memories, work, ledgers = zip(*found, strict=True)
        self.memories = list(memories)
        if self._recorder:
            self._recorder.memory(MemoryProfile(devices=self.memories, method=PROFILE_METHOD))
            self._recorder.work(work_of_all_ranks(work, stages=stages))
            self._recorder.ledger(of_all_ranks(ledgers, stages=stages, counts_own=engine.counts_own_calls))
