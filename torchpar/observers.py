"""What watches one rank's training. All ranks are watched, to put together what each found; rank 0 writes."""

import functools
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compare.checkpoint.saver import Part
from compare.contract import recording
from compare.contract.communication import LOSS
from compare.contract.ending import StopRequest
from compare.contract.memory_profile import MemoryProfile
from compare.contract.observers import Observer, Observers
from compare.contract.other_hosts import host_names
from compare.contract.record import ON_HOST, Recorder
from compare.contract.request import MOMENTS, Rung
from compare.contract.timing import Window, merged
from compare.host.facts import MemoryUse, cpu_seconds, versions
from compare.numerics.evaluation import Evaluation, evaluate
from compare.numerics.parameters import parameter_table
from compare.numerics.stream import arrays_of_step
from compare.spec.axes import ROWS
from compare.spec.engines.registry import ENGINES
from torchpar.comm.collectives import unobserved
from torchpar.comm.mesh import PACKAGES, device_kind
from torchpar.measure.instruments import Instruments
from torchpar.measure.ledger import of_all_ranks
from torchpar.measure.memory import CPU_METHOD, GPU_METHOD, PROFILE_METHOD, memory_in_use, resident_bytes
from torchpar.measure.work import of_all_ranks as work_of_all_ranks
from torchpar.offload import host_tensors
from torchpar.parallel_model import local
from torchpar.run import Run, autocast, to_device
from torchpar.shards import state_parts
from torchpar.weights import moment_keys, nanogpt_name, to_arrays


def observers_of(run: Run, folder: Path, *, started_utc: str) -> Observers:
    """Observers of this rank's training.

    Args:
        run: this rank's.
        folder: where rank 0 writes.
        started_utc: when this rank began.
    """
    recorder = Recorder(folder) if run.rank.rank == 0 else None
    instruments = Instruments(run)
    own: list[Observer] = [instruments]
    if run.request.profile:
        from torchpar.measure.timeline import StepProfiler  # what it marks is not imported for every run

        own.insert(0, StepProfiler(run, recorder, instruments))
    side = RankSide(run, instruments)
    return recording.observers_of(side, recorder, folder, started_utc=started_utc, own=own)


class RankSide:
    """One rank, as the record asks for it: a `RecordedSide`."""

    def __init__(self, run: Run, instruments: Instruments):
        self._run, self._instruments = run, instruments
        self.request, self.corpus_sha256 = run.request, run.corpus.sha256
        self.devices: Collection[int] = [run.rank.rank]

    def memory(self) -> MemoryUse:
        return memory_in_use(self._run.mesh.device)

    def not_finite(self) -> str:
        return first_not_finite(self._run)

    def tensors(self, rung: Rung) -> Mapping[str, np.ndarray]:
        """A rung's tensors: canonical name -> full tensor, from all ranks' pieces; on rank 0, else {}."""
        run, parallel = self._run, self._run.parallel
        match rung:
            case Rung.BATCH:
                return first_batch(run)
            case Rung.GRADIENTS:
                pieces = parallel.gradients()
            case Rung.FIRST_M | Rung.FIRST_V:
                pieces = parallel.moments(moment_keys(run.experiment.optimizer)[MOMENTS[rung]])
            case _:
                pieces = parallel.weights()
        with unobserved():
            full = parallel.full(pieces)
        return to_arrays(full, run.experiment.model) if run.rank.rank == 0 else {}

    def evaluate(self, step: int) -> Evaluation:
        return evaluate_weights(self._run, step)

    def is_to_stop(self) -> bool:
        if self._run.rank.rendezvous is not None:  # the signal reaches their parent alone
            return False
        return any(self._run.mesh.world.all_gather_objects(StopRequest.came))

    def parts(self) -> Iterator[Part]:
        return state_parts(self._run)

    def costs(self, windows: Sequence[Window], recorder: Recorder | None) -> dict[str, Any]:
        run, instruments = self._run, self._instruments
        held = resident(run, instruments.gradient_bytes)
        place = socket.gethostname(), run.rank.local_rank
        costs = (*instruments.findings(), cpu_seconds(), held, windows, place)
        found = run.mesh.world.all_gather_objects(costs)
        memories, work, ledgers, cpu, residents, windows_of_all, places = zip(*found, strict=True)
        if not recorder:
            return {}
        engine, hosts = ENGINES[run.request.engine], host_names(places)
        stages = [run.experiment.layout.stage_of(rank) for rank in range(len(found))]
        recorder.memory(MemoryProfile(devices=list(memories), method=PROFILE_METHOD))
        recorder.work(work_of_all_ranks(work, stages=stages))
        counts_own = engine.observed.counts_own_calls
        recorder.ledger(of_all_ranks(ledgers, stages=stages, counts_own=counts_own))
        return {
            "device_kind": device_kind(run.mesh.device),
            "initial_weights_sha256": run.initial_weights_sha256,
            "versions": versions(PACKAGES),
            "threads": f"{torch.get_num_threads()} per rank",
            "compile_s": run.compile_s,
            "cpu_time_s": sum(cpu) + run.rank.launcher_cpu_s,
            "peak_memory_bytes": [one.allocator_peak or one.peak.total for one in memories],
            "peak_memory_method": CPU_METHOD if run.mesh.device.type == "cpu" else GPU_METHOD,
            "resident_bytes": {kind: [of_rank[kind] for of_rank in residents] for kind in residents[0]},
            "windows": [merged(parts) for parts in zip(*windows_of_all, strict=True)],
            "hosts": hosts,
        }


def first_batch(run: Run) -> Mapping[str, np.ndarray]:
    """The batch of the first step as the devices have it, put together from all ranks' rows.

    Returns:
        inputs and targets, int32 (A, B, T), and with dropout keys, uint32 (A, B, 2).
    """
    batch = to_device(run, arrays_of_step(run.corpus, run.experiment, run.request.first_step))
    own = [tensor.cpu().numpy() for tensor in batch if tensor is not None]
    shares = run.mesh.joined(*ROWS).all_gather_objects(own)
    arrays = (np.concatenate(parts, axis=1).astype(np.int32) for parts in zip(*shares, strict=True))
    named = dict(zip(("inputs", "targets", "keys"), arrays, strict=False))
    return {name: array.view(np.uint32) if name == "keys" else array for name, array in named.items()}


def resident(run: Run, gradient_bytes: int) -> dict[str, int]:
    """Bytes that this rank keeps between two steps; gradients as they were just before the optimizer."""
    parallel = run.parallel
    held = {
        "parameters": resident_bytes([*parallel.module.parameters(), *parallel.parameters.values()]),
        "gradients": gradient_bytes,
        "optimizer": resident_bytes(parallel.optimizer_state()),
    }
    if run.experiment.layout.offload != "none":
        held[ON_HOST] = resident_bytes(host_tensors(parallel.optimizer))
    return held


def evaluate_weights(run: Run, step: int) -> Evaluation:
    """Evaluate the weights after so many steps; all ranks together."""
    evaluation = evaluate(run.experiment, run.corpus, step, functools.partial(mean_loss, run))
    if run.parallel.end_evaluation:
        run.parallel.end_evaluation()
    return evaluation


@torch.no_grad()
def mean_loss(run: Run, inputs_ABT: np.ndarray, targets_ABT: np.ndarray) -> torch.Tensor:
    """The mean loss of a global batch, a scalar, without gradients."""
    run.rank.at(run.state.step, "evaluation")
    data, batch = run.mesh.joined(*ROWS), to_device(run, {"inputs": inputs_ABT, "targets": targets_ABT})
    if run.parallel.run_pipeline:
        loss = run.parallel.run_pipeline(batch, functools.partial(autocast, run))
    else:
        with autocast(run):
            losses = [run.parallel.module(*one)[1] for one in batch.passes()]
        loss = torch.stack(losses).mean()
    if data.size > 1:
        data.all_reduce(loss, purpose=LOSS)
        loss /= data.size
    return loss


def first_not_finite(run: Run) -> str:
    """A clause that names the first gradient or weight that is not finite; all ranks call this together.

    `optimizer_step` leaves the gradients as they are if their norm is not finite. A peer has dropped them by
    then: its weights tell.
    """
    gradients = {name: p.grad for name, p in run.parallel.parameters.items() if p.grad is not None}
    own = bool(gradients), _not_finite(gradients), _not_finite(run.parallel.parameters)
    have_gradients, of_gradients, of_weights = zip(*run.mesh.world.all_gather_objects(own), strict=True)
    role, by_rank = ("gradient", of_gradients) if any(have_gradients) else ("weight", of_weights)
    names = {name for names in by_rank for name in names}
    rows = parameter_table(run.experiment.model)
    first = next((row.name for row in rows if nanogpt_name(row.name) in names), "")
    if first:
        return f"the first {role} that is not finite is that of {first}"
    return f"every entry of every {role} is finite"


def _not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of this rank's tensors with an entry that is not finite."""
    return [name for name, tensor in tensors.items() if not torch.isfinite(local(tensor.detach())).all()]
