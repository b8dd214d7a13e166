"""What watches a training in JAX."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from compare.checkpoint.saver import Part
from compare.contract import recording
from compare.contract.ending import StopRequest, first_not_finite
from compare.contract.ledger import Ledger
from compare.contract.observers import Observers
from compare.contract.record import ON_HOST, Recorder
from compare.contract.request import MOMENTS, Rung
from compare.contract.timing import Window
from compare.host.facts import MemoryUse, cpu_seconds, versions
from compare.numerics.evaluation import Evaluation, evaluate
from compare.numerics.stream import arrays_of_step
from jaxpar.checkpoint import state_parts
from jaxpar.comm.hosts import fetch, gathered, hosts_of, spread
from jaxpar.comm.mesh import device_kind
from jaxpar.configuration import PACKAGES
from jaxpar.measure.ledger import communications, listing
from jaxpar.measure.memory import memory_in_use, memory_profile, peak_memory, resident_bytes, threads
from jaxpar.measure.profile import StepProfiler
from jaxpar.run import Run
from jaxpar.step import ShardedStep, TrainState, compile_evaluation, device_scalars


def observers_of(run: Run, recorder: Recorder | None, folder: Path, *, started_utc: str) -> Observers:
    """Observers of a training; its evaluation is compiled here. Only the first process has a recorder."""
    own = [StepProfiler(run, recorder)] if run.request.profile and recorder else []
    return recording.observers_of(RunSide(run), recorder, folder, started_utc=started_utc, own=own)


class RunSide:
    """A run, as the record asks for it: a `RecordedSide`."""

    def __init__(self, run: Run):
        self._run = run
        self.request, self.corpus_sha256 = run.request, run.corpus.sha256
        process = jax.process_index()
        self.devices: Collection[int] = [
            number for number, device in enumerate(run.devices) if device.process_index == process
        ]
        evaluates = run.experiment.train.eval_interval > 0
        self._loss = compile_evaluation(run.sharded, run.state, run.experiment) if evaluates else None

    def memory(self) -> MemoryUse:
        return memory_in_use(self._run.devices[min(self.devices)])

    def not_finite(self) -> str:
        """The first weight that is infinite or NaN: gradients stay inside the step."""
        if first := first_not_finite(self.tensors(Rung.FINAL_WEIGHTS)):
            return f"the first weight that is not finite after the step is {first}"
        return "every weight is finite after the step"

    def tensors(self, rung: Rung) -> Mapping[str, np.ndarray]:
        """A rung's tensors: canonical name -> full tensor, fetched from the devices."""
        run, state = self._run, self._run.state
        match rung:
            case Rung.BATCH:
                arrays = arrays_of_step(run.corpus, run.experiment, run.request.first_step)
                return fetch(spread(arrays, run.sharded.batch))
            case Rung.GRADIENTS:
                tree = state.gradients
            case Rung.FIRST_M | Rung.FIRST_V:
                tree = run.moments(state.opt_state)[MOMENTS[rung]]
            case _:
                tree = state.params
        return run.canonical(tree)

    def evaluate(self, step: int) -> Evaluation:
        run, state, loss = self._run, self._run.state, self._loss
        assert loss, "an experiment that evaluates nothing"

        def loss_of(inputs_ABT: np.ndarray, targets_ABT: np.ndarray) -> jax.Array:
            placed = spread({"inputs": inputs_ABT, "targets": targets_ABT}, run.sharded.batch)
            return loss(state.params, state.opt_state, placed, device_scalars(run.experiment, state))

        return evaluate(run.experiment, run.corpus, step, loss_of)

    def is_to_stop(self) -> bool:
        return any(gathered([StopRequest.came]))

    def parts(self) -> Iterator[Part]:
        return state_parts(self._run.sharded, self._run.state, self._run.experiment.model)

    def costs(self, windows: Sequence[Window], recorder: Recorder | None) -> dict[str, Any]:
        run = self._run
        peak_memory_bytes, peak_memory_method = peak_memory(run.step, run.devices)
        costs = {
            "device_kind": device_kind(run.devices[0]),
            "initial_weights_sha256": run.initial_weights_sha256,
            "versions": versions(PACKAGES),
            "threads": threads(run.devices),
            "compile_s": run.compile_s,
            "cpu_time_s": sum(gathered([cpu_seconds()])),
            "peak_memory_bytes": peak_memory_bytes,
            "peak_memory_method": peak_memory_method,
            "resident_bytes": at_rest(run),
            "windows": list(windows),
            "hosts": hosts_of(run.devices),
        }
        if recorder:
            # After the CPU time: reading a program is no part of the run.
            leave_program(run, recorder)
        return costs


def leave_program(run: Run, recorder: Recorder) -> None:
    """Memory, instructions and ledger of the compiled step."""
    step, axes, state = run.step, run.experiment.layout.axes, at_rest(run)
    hlo = step.as_text()
    assert hlo, "XLA keeps no text of the compiled step"
    profile = memory_profile(step, parameters=state["parameters"][0], optimizer=state["optimizer"][0])
    if profile:
        recorder.memory(profile)
    recorder.instructions(listing(hlo, axes))
    problems: list[str] = []
    rows = communications(hlo, axes, problems=problems)
    recorder.ledger(Ledger(rows=rows, problems=problems))


def at_rest(run: Run) -> dict[str, list[int]]:
    """Bytes between two steps on each device: parameters, gradients, moments, and what rests on the host."""
    state, devices = run.state, run.devices
    gradients = gradients_at_rest(run.sharded, state)
    trees = {"parameters": state.params, "gradients": gradients, "optimizer": state.opt_state}
    resident = {name: resident_bytes(tree, devices) for name, tree in trees.items()}
    if run.sharded.moments_at_rest is not None:
        resident[ON_HOST] = resident_bytes(state.opt_state, devices, on_host=True)
    return resident


def gradients_at_rest(sharded: ShardedStep, state: TrainState) -> Any:
    """Shapes and shardings of the accumulated gradients, as the step is to keep them: they never leave it."""
    return jax.tree.map(
        lambda w, sharding: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding),
        state.params,
        sharded.accumulated,
    )
