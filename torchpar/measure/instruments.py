"""Instruments around one step of a rank: communication, memory and work."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager, nullcontext

import torch

from compare.contract.memory_profile import Class, DeviceMemory
from compare.contract.work import ObservedWork
from compare.side.recording import Observer
from torchpar.measure.ledger import LedgerSink, RankLedger
from torchpar.measure.memory import MemorySink, resident_bytes
from torchpar.measure.watch import Watch, around_tasks
from torchpar.measure.work import WorkSink
from torchpar.offload import device_tensors, host_tensors
from torchpar.run import Run

# DDP sends its order of buckets once, in step 1. Step 2 is the first that is like all later ones. A training
# of two steps is watched in step 0, which sends the messages of a later step too.
INSTRUMENTED_STEP = 2


class Instruments(Observer):
    """Watches one step of a rank. `gradient_bytes` is the size of its gradients just before the update."""

    def __init__(self, run: Run):
        self._run = run
        request = run.request
        first, left = request.next_step, request.experiment.train.max_iters - request.next_step
        usual = first + (INSTRUMENTED_STEP if left > INSTRUMENTED_STEP else 0)
        self.watched = request.timing.watched if request.timing else usual
        axes = {str(axis.group.group_name): axis.name for axis in run.mesh.axes.values() if axis.group}
        self.ledger = LedgerSink(axes, infers_purposes=True)
        self.gradient_bytes = 0

    @contextmanager
    def watch(self) -> Generator[None]:
        """Record communication, allocations and work of the step inside."""
        engine = self._run.engine
        modules = [*engine.module.parameters(), *engine.module.buffers()]
        present: dict[Class, Iterable[torch.Tensor]] = {
            "parameters": [*modules, *engine.parameters.values()],
            "optimizer": device_tensors(engine.optimizer),
            "gathered parameters": engine.resized_buffers,
        }
        elsewhere, device = host_tensors(engine.optimizer), self._run.mesh.device.type
        self._memory = MemorySink(present, elsewhere=elsewhere, module=engine.module, device=device)
        self._work = WorkSink(engine.module)
        tasks = around_tasks(self._work.task) if engine.run_pipeline else nullcontext()
        # The modes of the instruments must not compile the module again: other steps run this program, too.
        unsafe = engine.compiled is not None
        no_guards = torch.compiler.set_stance(skip_guard_eval_unsafe=True) if unsafe else nullcontext()
        with no_guards, tasks, Watch(self._memory, self.ledger, self._work):
            yield
            self._memory.tag("optimizer", device_tensors(engine.optimizer))  # the first step makes the state

    def gradients(self, step: int) -> None:
        """Count later allocations to the optimizer."""
        if step == self.watched:
            engine = self._run.engine
            # Full parameters have gradients of any shape; shards have gradients too.
            holders = [*engine.module.parameters(), *engine.parameters.values()]
            gradients = [holder.grad for holder in holders if holder.grad is not None]
            self.gradient_bytes = resident_bytes(gradients)
            self._memory.tag("gradients", gradients)
            self._memory.watch.is_updating = True

    def findings(self) -> tuple[DeviceMemory, ObservedWork, RankLedger]:
        """Memory, work and ledger of the step, after its end."""
        compiled, work = self._run.engine.compiled, self._work.result()
        if compiled:
            work = compiled(work)
        return self._memory.result(), work, self.ledger.result()
