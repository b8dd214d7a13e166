"""The record of one process: the tensors, losses, memory and costs that a `Recording` requests."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from compare.checkpoint.reader import read_description
from compare.checkpoint.saver import Part
from compare.contract.record import Recorder
from compare.contract.request import MOMENTS, Request, Rung
from compare.contract.timing import Window
from compare.numerics.boxes import Weights
from compare.numerics.parameters import fingerprint
from compare.numerics.shards import digests_of, replicas_apart
from compare.numerics.stream import Evaluation, arrays_of_step, evaluate
from compare.side.ending import StopRequest
from compare.side.recording import Recording
from compare.system.facts import cpu_seconds, versions
from jaxpar import PACKAGES
from jaxpar.checkpoint import gather_tensors, local_shards, state_parts
from jaxpar.comm.hosts import all_gather_numbers, all_gather_texts, hosts_of, to_host
from jaxpar.comm.mesh import device_kind
from jaxpar.engine import Engine
from jaxpar.measure.ledger import read_ledger
from jaxpar.measure.memory import bytes_at_rest, memory_in_use, memory_profile, peak_memory, threads
from jaxpar.measure.profile import StepProfiler
from jaxpar.programs import TrainState, device_scalars
from jaxpar.run import Run


def make_recording(run: Run, folder: Path) -> Recording:
    """The recording of this process's loop. All processes write checkpoints; the first writes all else."""
    recorder = Recorder(folder) if jax.process_index() == 0 else None
    if recorder:
        recorder.leave(run.work)
    profilers = [StepProfiler(run, recorder)] if run.request.profile and recorder else []
    return Recording(RecordedProcess(run), recorder, folder, profilers)


def first_sha256(request: Request, engine: Engine, state: TrainState, initial: Weights) -> str:
    """The fingerprint of the first weights, on the first process.

    A run that continues has it in its checkpoint. One process reads the weights back from its devices.
    Several processes trust the request, or what was drawn: reading back would send weights.
    """
    if request.continues:
        return read_description(Path(request.continues.checkpoint)).initial_sha256
    if jax.process_count() == 1:
        return fingerprint(gather_tensors(state.params, engine))
    return request.init_sha256 or (fingerprint(initial) if jax.process_index() == 0 else "")


class RecordedProcess:
    """One process as a `RecordedSide`. All processes call each method together."""

    def __init__(self, run: Run):
        self._run = run
        self.request, self.corpus_sha256 = run.request, run.corpus.sha256
        self.initial_weights_sha256 = run.initial_weights_sha256
        here = jax.process_index()
        self.devices: Collection[int] = [
            number for number, device in enumerate(run.devices) if device.process_index == here
        ]

    def memory(self) -> int:
        return memory_in_use(self._run.devices[min(self.devices)])

    def describe_non_finite(self) -> str:
        """A clause that names the first weight that is not finite. Gradients stay inside the step."""
        for name, weight in self.tensors(Rung.FINAL_WEIGHTS).items():
            if not np.isfinite(weight).all():
                return f"the first weight that is not finite after the step is {name}"
        return "every weight is finite after the step"

    def tensors(self, rung: Rung) -> Mapping[str, np.ndarray]:
        """A rung's tensors: canonical name -> full tensor."""
        run, state = self._run, self._run.state
        match rung:
            case Rung.BATCH:
                arrays = arrays_of_step(run.corpus, run.experiment, run.request.first_step)
                return to_host(run.shard_batch(arrays))
            case Rung.ROUTING:
                return {"experts": np.ascontiguousarray(to_host(state.expert_ids).swapaxes(0, 1))}
            case Rung.GRADIENTS | Rung.SECOND_GRADIENTS:
                tree = state.gradients
            case _ if rung in MOMENTS:
                tree = run.engine.optimizer.moments(state.opt_state)[MOMENTS[rung]]
            case _:
                tree = state.params
        return gather_tensors(tree, run.engine)

    def evaluate(self, step: int) -> Evaluation:
        run, state = self._run, self._run.state
        compiled, scalars = run.loss_program, device_scalars(run.experiment, state)
        assert compiled, "an experiment that evaluates nothing"

        def loss_of(inputs_ABT: np.ndarray, targets_ABT: np.ndarray) -> jax.Array:
            batch = run.shard_batch({"inputs": inputs_ABT, "targets": targets_ABT})
            return compiled(state.params, state.opt_state, batch, scalars)

        return evaluate(run.experiment, run.corpus, step, loss_of)

    def should_stop(self) -> bool:
        return any(all_gather_numbers([StopRequest.came]))

    def checkpoint_parts(self) -> Iterator[Part]:
        return state_parts(self._run.engine, self._run.state)

    def manifest_fields(self, windows: Sequence[Window], recorder: Recorder | None) -> dict[str, Any]:
        run, devices = self._run, self._run.devices
        peak_memory_bytes, peak_memory_method = peak_memory(run.train_program, devices)
        resident = bytes_at_rest(run.engine, run.state)
        fields = {
            "device_kind": device_kind(devices[0]),
            "versions": versions(PACKAGES),
            "threads": threads(devices),
            "compile_s": run.compile_s,
            "compiler_options": run.engine.compiler_options,
            "cpu_time_s": sum(all_gather_numbers([cpu_seconds()])),
            "peak_memory_bytes": peak_memory_bytes,
            "peak_memory_method": peak_memory_method,
            "resident_bytes": resident,
            "windows": list(windows),
            "hosts": hosts_of(devices),
        }
        if recorder:  # after the CPU time, because reading a program does not belong to the run
            hlo, axes = run.train_program.as_text(), run.experiment.layout.axes
            assert hlo, "XLA keeps no text of the compiled step"
            sizes = {name: resident[name][0] for name in ("parameters", "optimizer")}
            if profile := memory_profile(run.train_program, **sizes):
                recorder.leave(profile)
            recorder.leave(read_ledger(hlo, axes))
        if len(devices) > 1:
            shards = local_shards(run.state.params, run.engine)
            texts = all_gather_texts(json.dumps(digests_of(shards)))
            fields["replicas_apart"] = replicas_apart(digest for text in texts for digest in json.loads(text))
        return fields
