"""What watches one rank's training. All ranks are watched, to put together what each found; rank 0 writes."""

import functools
import itertools
import socket
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from compare.checkpoint.saver import Part
from compare.contract.memory_profile import Class, DeviceMemory, MemoryProfile
from compare.contract.record import ON_HOST, Recorder
from compare.contract.request import MOMENTS, Rung
from compare.contract.timing import Window, merged
from compare.contract.work import ObservedWork
from compare.numerics.context import order_of_positions
from compare.numerics.parameters import parameter_table
from compare.numerics.shards import digests_of, replicas_apart
from compare.numerics.stream import Evaluation, arrays_of_step, evaluate
from compare.side.ending import StopRequest
from compare.side.host_facts import host_names
from compare.side.recording import Observer, Recording
from compare.spec.axes import CP, DATA, PP
from compare.spec.engines.registry import ENGINES
from compare.system.facts import cpu_seconds, process_memory, versions
from torchpar.comm.collectives import unobserved
from torchpar.comm.mesh import PACKAGES, device_kind
from torchpar.measure import ledger, work
from torchpar.measure.memory import CPU_METHOD, GPU_METHOD, PROFILE_METHOD, MemorySink, resident_bytes
from torchpar.measure.watch import Watch, around_tasks
from torchpar.offload import host_tensors
from torchpar.parallel_model import local
from torchpar.run import Run, autocast, to_device
from torchpar.shards import held, shards, state_parts
from torchpar.weights import moment_keys, nanogpt_name, to_arrays

# DDP sends its bucket order in step 1, once: step 2 is the first that is like all later ones.
INSTRUMENTED_STEP = 2


def recording_of(run: Run, folder: Path) -> Recording:
    """What is told of this rank's loop; rank 0 writes into the folder."""
    recorder = Recorder(folder) if run.rank.rank == 0 else None
    instruments = Instruments(run)
    own: list[Observer] = [instruments]
    if run.request.profile:
        from torchpar.measure.timeline import StepProfiler  # what it marks is not imported for every run

        own.insert(0, StepProfiler(run, recorder, instruments.ledger, instrumented=instruments.watched))
    return Recording(RankSide(run, instruments), recorder, folder, own)


class Instruments(Observer):
    """Watches one step of a rank; `gradient_bytes` are of its gradients just before the optimizer."""

    def __init__(self, run: Run):
        self._run = run
        request = run.request
        usual = request.first_step + min(INSTRUMENTED_STEP, request.steps - 1)
        self.watched = request.timing.watched if request.timing else usual
        self.ledger = ledger.LedgerSink(run.mesh)
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
        self._work = work.WorkSink(parallel.module)
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

    def findings(self) -> tuple[DeviceMemory, ObservedWork, ledger.RankLedger]:
        """Memory, work and ledger of the step, which is over."""
        compiled, seen = self._run.parallel.compiled, self._work.seen()
        if compiled:
            seen = replace(seen, **compiled(is_fused=not seen.forward.get("activations")))
        return self._memory.memory(), seen, self.ledger.noted()


class RankSide:
    """One rank, as the record asks for it: a `RecordedSide`."""

    def __init__(self, run: Run, instruments: Instruments):
        self._run, self._instruments = run, instruments
        self.request, self.corpus_sha256 = run.request, run.corpus.sha256
        self.devices: Collection[int] = [run.rank.rank]

    def memory(self) -> int:
        """The allocator's on a GPU, this process's RAM on a CPU."""
        device = self._run.mesh.device
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else process_memory()

    def not_finite(self) -> str:
        """A clause that names the first gradient that is not finite; of a peer, which drops them, weight."""
        parameters, world = self._run.parallel.parameters, self._run.mesh.world
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        are_there = any(world.all_gather_objects(bool(gradients)))
        role, tensors = ("gradient", gradients) if are_there else ("weight", parameters)
        wrong = [name for name, tensor in tensors.items() if not local(tensor.detach()).isfinite().all()]
        names = {name for names in world.all_gather_objects(wrong) for name in names}
        for row in parameter_table(self._run.experiment.model):
            if nanogpt_name(row.name) in names:
                return f"the first {role} that is not finite is that of {row.name}"
        return f"every entry of every {role} is finite"

    def tensors(self, rung: Rung) -> Mapping[str, np.ndarray]:
        """A rung's tensors: canonical name -> full tensor, from all ranks' pieces; on rank 0, else {}."""
        run, parallel = self._run, self._run.parallel
        match rung:
            case Rung.BATCH:
                return first_batch(run)
            case Rung.ROUTING:
                chosen_ABTLk = torch.stack([chosen_LBTk for chosen_LBTk, _ in run.routing]).movedim(1, 3)
                with unobserved():
                    whole_ABTLk = of_all_data(run, {"experts": chosen_ABTLk})["experts"]
                return {"experts": np.ascontiguousarray(np.moveaxis(whole_ABTLk, 3, 0))}
            case Rung.GRADIENTS | Rung.SECOND_GRADIENTS:
                pieces = parallel.gradients()
            case _ if rung in MOMENTS:
                pieces = parallel.moments(moment_keys(run.experiment.optimizer)[MOMENTS[rung]])
            case _:
                pieces = parallel.weights()
        with unobserved():
            full = parallel.full(pieces)
        return to_arrays(full, run.experiment.model) if run.rank.rank == 0 else {}

    def evaluate(self, step: int) -> Evaluation:
        run = self._run
        evaluation = evaluate(run.experiment, run.corpus, step, self._mean_loss)
        if run.parallel.end_evaluation:
            run.parallel.end_evaluation()
        return evaluation

    def is_to_stop(self) -> bool:
        return any(self._run.mesh.world.all_gather_objects(StopRequest.came))

    def parts(self) -> Iterator[Part]:
        return state_parts(self._run)

    def costs(self, windows: Sequence[Window], recorder: Recorder | None) -> dict[str, Any]:
        run, place = self._run, (socket.gethostname(), self._run.rank.local_rank)
        mine = (*self._instruments.findings(), cpu_seconds(), self._resident_bytes(), windows, place)
        own = shards(run.parallel, run.experiment.model, run.mesh)
        found = run.mesh.world.all_gather_objects((*mine, digests_of(held(run.parallel.weights(), own))))
        memories, works, ledgers, cpu, residents, windows_of_all, places, digests = zip(*found, strict=True)
        if not recorder:
            return {}
        stages = [run.experiment.layout.coordinates(rank)[PP] for rank in range(len(found))]
        counts_own = ENGINES[run.request.engine].counts_own_calls
        recorder.leave(
            MemoryProfile(devices=list(memories), method=PROFILE_METHOD),
            work.of_all_ranks(works, stages=stages),
            ledger.of_all_ranks(ledgers, stages=stages, counts_own=counts_own),
        )
        return {
            "device_kind": device_kind(run.mesh.device),
            "initial_weights_sha256": run.initial_weights_sha256,
            "versions": versions(PACKAGES),
            "threads": f"{torch.get_num_threads()} per rank",
            "compile_s": run.compile_s,
            "cpu_time_s": sum(cpu) + run.rank.launcher_cpu_s,
            "peak_memory_bytes": [one.allocator_peak or one.peak.total for one in memories],
            "peak_memory_method": CPU_METHOD if run.mesh.device.type == "cpu" else GPU_METHOD,
            "resident_bytes": {role: [of_rank[role] for of_rank in residents] for role in residents[0]},
            "replicas_apart": replicas_apart(itertools.chain(*digests)),
            "windows": [merged(parts) for parts in zip(*windows_of_all, strict=True)],
            "hosts": host_names(places),
        }

    def _resident_bytes(self) -> dict[str, int]:
        """What this rank keeps between two steps; gradients as they were just before the optimizer."""
        parallel = self._run.parallel
        resident = {
            "parameters": resident_bytes(
                [*parallel.module.parameters(), *parallel.parameters.values(), *parallel.transient]
            ),
            "gradients": self._instruments.gradient_bytes,
            "optimizer": resident_bytes(parallel.optimizer_state()),
        }
        if self._run.experiment.layout.offload != "none":
            resident[ON_HOST] = resident_bytes(host_tensors(parallel.optimizer))
        return resident

    @torch.no_grad()
    def _mean_loss(self, inputs_ABT: np.ndarray, targets_ABT: np.ndarray) -> torch.Tensor:
        """Of a global batch, a scalar."""
        run = self._run
        run.rank.at(run.state.step, "evaluation")
        batch = to_device(run, {"inputs": inputs_ABT, "targets": targets_ABT})
        if run.parallel.run_pipeline:
            loss = run.parallel.run_pipeline(batch, functools.partial(autocast, run))
        else:
            with autocast(run):
                losses = [run.parallel.module(*arguments)[1] for arguments in batch.passes()]
            loss = torch.stack(losses).mean()
        return run.mean_over_data(loss)


def first_batch(run: Run) -> Mapping[str, np.ndarray]:
    """The batch of the first step as the devices have it: inputs and targets, int32 (A, B, T), and with
    dropout keys, uint32 (A, B, 2)."""
    batch = to_device(run, arrays_of_step(run.corpus, run.experiment, run.request.first_step))
    named = dict(zip(("inputs", "targets", "keys"), batch, strict=True))
    arrays = of_all_data(run, {name: tensor for name, tensor in named.items() if tensor is not None})
    return {name: array.view(np.uint32) if name == "keys" else array for name, array in arrays.items()}


def of_all_data(run: Run, own: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Tensors (A, B, T, ..), int32, put together from all ranks' parts of a batch; keys are (A, B, 2)."""
    mine = {name: tensor.cpu().numpy() for name, tensor in own.items()}
    shares, parts_of_T = run.mesh.joined(*DATA).all_gather_objects(mine), run.mesh[CP].size
    back_T = order_of_positions(run.experiment.model.block_size, run.experiment.layout).argsort()
    named = {}
    for name in own:
        parts = [share[name] for share in shares]
        if name == "keys":  # the same of all parts of a sequence
            rows = parts[::parts_of_T]
        else:
            of_rows = (parts[first : first + parts_of_T] for first in range(0, len(parts), parts_of_T))
            rows = [np.concatenate(of_sequences, axis=2)[:, :, back_T] for of_sequences in of_rows]
        named[name] = np.concatenate(rows, axis=1).astype(np.int32)
    return named
