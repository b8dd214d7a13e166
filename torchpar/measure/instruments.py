"""Instruments of one step: its ledger, its memory by class, and what it computes."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager, nullcontext

import torch
from msgspec.structs import replace

from compare.contract.memory_profile import Class, DeviceMemory
from compare.contract.recording import Observer
from compare.contract.work import ObservedWork
from torchpar.measure.ledger import LedgerSink, RankLedger
from torchpar.measure.memory import MemorySink, resident_bytes
from torchpar.measure.watch import Watch, around_tasks
from torchpar.measure.work import WorkSink
from torchpar.offload import host_tensors
from torchpar.run import Run

# DDP sends its bucket order in step 1, once: step 2 is the first that is like all later ones.
INSTRUMENTED_STEP = 2


class Instruments(Observer):
    """Watches one step of a rank; `gradient_bytes` are of its gradients just before the optimizer."""

    def __init__(self, run: Run):
        self._run = run
        self.watched = run.request.first_step + min(INSTRUMENTED_STEP, run.request.steps - 1)
        self.ledger = LedgerSink(run.mesh)
        self.gradient_bytes = 0

    @contextmanager
    def watch(self) -> Generator[None]:
        """Note communication, allocations and work of the step inside."""
        parallel = self._run.parallel
        modules = [*parallel.module.parameters(), *parallel.module.buffers()]
        present: dict[Class, Iterable[torch.Tensor]] = {
            "parameters": [*modules, *parallel.parameters.values()],
            "optimizer": parallel.optimizer_state(),
            "gathered parameters": parallel.transient,
        }
        elsewhere, device = host_tensors(parallel.optimizer), self._run.mesh.device.type
        self._memory = MemorySink(present, elsewhere=elsewhere, module=parallel.module, device=device)
        self._work = WorkSink(parallel.module)
        tasks = around_tasks(self._work.task) if parallel.run_pipeline else nullcontext()
        # To be watched is no reason to compile anew: other steps run this, too.
        unsafe = parallel.compiled is not None
        as_it_is = torch.compiler.set_stance(skip_guard_eval_unsafe=True) if unsafe else nullcontext()
        with as_it_is, tasks, Watch(self._memory, self.ledger, self._work):
            yield
            self._memory.tag("optimizer", parallel.optimizer_state())  # which a first step makes

    def gradients(self, step: int) -> None:
        """Count later allocations to the optimizer."""
        if step == self.watched:
            gradients = self._run.parallel.held_gradients()
            self.gradient_bytes = resident_bytes(gradients)
            self._memory.tag("gradients", gradients)
            self._memory.watch.is_updating = True

    def findings(self) -> tuple[DeviceMemory, ObservedWork, RankLedger]:
        """Memory, work and ledger of the step, which is over."""
        compiled = self._run.parallel.compiled
        work = replace(self._work.seen(), compiled=compiled() if compiled else "")
        return self._memory.memory(), work, self.ledger.noted()
