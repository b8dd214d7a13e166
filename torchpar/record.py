"""The record of one rank: the tensors, losses, memory and costs of a `Recording`. Rank 0 writes."""

import itertools
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compare.checkpoint.reader import read_description
from compare.checkpoint.saver import Part
from compare.contract.memory_profile import MemoryProfile
from compare.contract.record import ON_HOST, Recorder
from compare.contract.request import MOMENTS, Rung
from compare.contract.timing import Window, merged
from compare.numerics.boxes import Weights
from compare.numerics.parameters import fingerprint, parameter_table
from compare.numerics.shards import digests_of, replicas_apart
from compare.numerics.stream import Evaluation, arrays_of_step, evaluate
from compare.side.ending import StopRequest
from compare.side.host_facts import host_names
from compare.side.recording import Observer, Recording
from compare.spec.axes import PP
from compare.spec.engines.registry import ENGINES
from compare.system.facts import cpu_seconds, process_memory, versions
from torchpar import PACKAGES
from torchpar.batch import gather_batch
from torchpar.checkpoint import all_moments, local_shards, shards_of, state_parts
from torchpar.comm.collectives import unobserved
from torchpar.comm.mesh import device_kind
from torchpar.measure import ledger, work
from torchpar.measure.instruments import Instruments
from torchpar.measure.memory import (
    CPU_METHOD,
    GPU_METHOD,
    INSIDE_A_PROGRAM,
    PROFILE_METHOD,
    resident_bytes,
)
from torchpar.offload import device_tensors, host_tensors
from torchpar.run import Run
from torchpar.sharding import local
from torchpar.weights import moment_keys, nanogpt_name, to_array, to_arrays


def make_recording(run: Run, folder: Path) -> Recording:
    """The recording of this rank's loop. Rank 0 writes into the folder; all ranks write checkpoints."""
    recorder = Recorder(folder) if run.rank.rank == 0 else None
    instruments = Instruments(run)
    observers: list[Observer] = [instruments]
    if run.request.profile:
        from torchpar.measure.timeline import StepProfiler  # slow to import

        observers.insert(0, StepProfiler(run, recorder, instruments.ledger, instrumented=instruments.watched))
    if run.request.trace:
        from torchpar.measure.trace import Tracer

        observers.insert(0, Tracer(run, recorder))  # the ledger does not observe its messages
    return Recording(RecordedRank(run, instruments), recorder, folder, observers)


def first_sha256(run: Run, first: Weights) -> str:
    """The SHA-256 of the first weights, as this rank has them, or if they are sharded, as they were given.

    The given weights are read once more, one tensor after the other. A run that continues has the digest in
    its checkpoint.
    """
    if run.request.continues:
        return read_description(Path(run.request.continues.checkpoint)).initial_sha256
    rows, weights = {row.name: row for row in parameter_table(run.experiment.model)}, run.engine.weights()
    names = {name: nanogpt_name(name) for name in rows}
    if all(name in weights and not run.engine.sharding.axes.get(name) for name in names.values()):
        return fingerprint(Weights(rows, lambda name: to_array(rows[name], local(weights[names[name]]))))
    return run.request.init_sha256 or fingerprint(first)


class RecordedRank:
    """One rank as a `RecordedSide`. All ranks call each method together, to combine their parts."""

    def __init__(self, run: Run, instruments: Instruments):
        self._run, self._instruments = run, instruments
        self.request, self.corpus_sha256 = run.request, run.corpus.sha256
        self.initial_weights_sha256 = run.initial_weights_sha256
        self.devices: Collection[int] = [run.rank.rank]

    def memory(self) -> int:
        """Bytes that the allocator of the GPU has given out; on a CPU the RAM of this process."""
        device = self._run.mesh.device
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else process_memory()

    def describe_non_finite(self) -> str:
        """A clause that names the first gradient that is not finite, or weight if gradients are gone."""
        engine, world = self._run.engine, self._run.mesh.world
        gradients = engine.gradients()
        are_there = any(world.all_gather_objects(bool(gradients)))
        role, tensors = ("gradient", gradients) if are_there else ("weight", engine.parameters)
        wrong = [name for name, tensor in tensors.items() if not local(tensor.detach()).isfinite().all()]
        names = {name for names in world.all_gather_objects(wrong) for name in names}
        for row in parameter_table(self._run.experiment.model):
            if nanogpt_name(row.name) in names:
                return f"the first {role} that is not finite: {row.name}"
        return f"every entry of every {role} is finite"

    def tensors(self, rung: Rung) -> Mapping[str, np.ndarray]:
        """A rung's full tensors by canonical name, from the shards of all ranks. {} on all but rank 0."""
        run, engine = self._run, self._run.engine
        match rung:
            case Rung.BATCH:
                return self._first_batch()
            case Rung.ROUTING:
                chosen_ABTLk = torch.stack([chosen_LBTk for chosen_LBTk, _ in run.routing]).movedim(1, 3)
                with unobserved():
                    whole_ABTLk = gather_batch({"experts": chosen_ABTLk}, run.mesh)["experts"]
                return {"experts": np.ascontiguousarray(np.moveaxis(whole_ABTLk, 3, 0))}
            case Rung.GRADIENTS | Rung.SECOND_GRADIENTS:
                shards = engine.gradients()
            case _ if rung in MOMENTS:
                shards = all_moments(engine, moment_keys(run.experiment.optimizer)[MOMENTS[rung]])
            case _:
                shards = engine.weights()
        with unobserved():
            full = engine.gather(shards)
        return to_arrays(full, run.experiment.model) if run.rank.rank == 0 else {}

    def evaluate(self, step: int) -> Evaluation:
        """The mean losses of the weights after `step` steps."""
        run = self._run
        evaluation = evaluate(run.experiment, run.corpus, step, self._mean_loss)
        run.engine.end_evaluation()
        return evaluation

    def should_stop(self) -> bool:
        """True on all ranks if any rank was asked to stop."""
        asked = torch.tensor(float(StopRequest.came), device=self._run.mesh.device)
        with unobserved():
            self._run.mesh.world.all_reduce(asked)  # cheaper than objects: this runs between any two steps
        return asked.item() > 0

    def checkpoint_parts(self) -> Iterator[Part]:
        """This rank's shards of weights and moments."""
        return state_parts(self._run)

    def manifest_fields(self, windows: Sequence[Window], recorder: Recorder | None) -> dict[str, Any]:
        """Write memory, work and ledger of all ranks. Rank 0 returns the manifest's fields of this side."""
        run, place = self._run, (socket.gethostname(), self._run.rank.local_rank)
        measured = (*self._instruments.findings(), cpu_seconds(), self._resident_bytes(), windows, place)
        weights = local_shards(run.engine.weights(), shards_of(run.engine, run.experiment.model, run.mesh))
        everywhere = run.mesh.world.all_gather_objects((*measured, digests_of(weights)))
        memories, works, ledgers, cpu, residents, windows_of_all, places, digests = zip(
            *everywhere, strict=True
        )
        if not recorder:
            return {}
        stages = [run.experiment.layout.coordinates(rank)[PP] for rank in range(len(everywhere))]
        unseen = INSIDE_A_PROGRAM if "inductor" in works[0].compiled else ""
        counts_own = ENGINES[run.request.engine].counts_own_calls
        recorder.leave(
            MemoryProfile(devices=list(memories), method=PROFILE_METHOD + unseen),
            work.of_all_ranks(works, stages=stages),
            ledger.of_all_ranks(ledgers, stages=stages, counts_own=counts_own),
        )
        return {
            "device_kind": device_kind(run.mesh.device),
            "versions": versions(PACKAGES),
            "threads": f"{torch.get_num_threads()} per rank",
            "compile_s": run.compile_s,
            "cpu_time_s": sum(cpu) + run.rank.launcher_cpu_s,
            "peak_memory_bytes": [memory.allocator_peak or memory.peak.total for memory in memories],
            "peak_memory_method": CPU_METHOD + unseen if run.mesh.device.type == "cpu" else GPU_METHOD,
            "resident_bytes": {role: [of_rank[role] for of_rank in residents] for role in residents[0]},
            "replicas_apart": replicas_apart(itertools.chain(*digests)),
            "windows": [merged(parts) for parts in zip(*windows_of_all, strict=True)],
            "hosts": host_names(places),
        }

    def _resident_bytes(self) -> dict[str, int]:
        """Bytes that this rank needs between two steps; of gradients just before the optimizer."""
        engine = self._run.engine
        resident = {
            "parameters": resident_bytes(
                [*engine.module.parameters(), *engine.parameters.values(), *engine.resized_buffers]
            ),
            "gradients": self._instruments.gradient_bytes,
            "optimizer": resident_bytes(device_tensors(engine.optimizer)),
        }
        if self._run.experiment.layout.offload != "none":
            resident[ON_HOST] = resident_bytes(host_tensors(engine.optimizer))
        return resident

    def _first_batch(self) -> Mapping[str, np.ndarray]:
        """The first step's batch, gathered from the devices: inputs and targets, int32 (A, B, T), and with
        dropout keys, uint32 (A, B, 2)."""
        run = self._run
        batch = run.shard_batch(arrays_of_step(run.corpus, run.experiment, run.request.first_step))
        named = dict(zip(("inputs", "targets", "keys"), batch, strict=True))
        tensors = {name: tensor for name, tensor in named.items() if tensor is not None}
        whole = gather_batch(tensors, run.mesh)
        return {name: array.view(np.uint32) if name == "keys" else array for name, array in whole.items()}

    @torch.no_grad()
    def _mean_loss(self, inputs_ABT: np.ndarray, targets_ABT: np.ndarray) -> torch.Tensor:
        """The mean loss of a global batch, ()."""
        run = self._run
        run.rank.at(run.state.step, "evaluation")
        batch = run.shard_batch({"inputs": inputs_ABT, "targets": targets_ABT})
        with run.engine.step_context():
            if run.engine.run_pipeline:
                loss = run.engine.run_pipeline(batch, run.autocast)
            else:
                with run.autocast():
                    losses = [run.engine.module(*arguments)[1] for arguments in batch.passes()]
                loss = torch.stack(losses).mean()
        return run.mean_over_data(loss)
