"""A run: everything that it trains with, and what its record asks of it."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from compare.checkpoint.saver import Part
from compare.contract.record import Recorder
from compare.contract.request import MOMENTS, Request, Rung
from compare.contract.timing import Window
from compare.numerics.context import order_of_positions
from compare.numerics.data import Corpus
from compare.numerics.shards import digests_of, replicas_apart
from compare.numerics.stream import Evaluation, arrays_of_step, evaluate
from compare.side.ending import StopRequest
from compare.spec.experiment import Experiment
from compare.system.facts import cpu_seconds, versions
from jaxpar import weights
from jaxpar.checkpoint import local_shards, state_parts
from jaxpar.comm.hosts import exchange, fetch, gathered, hosts_of, spread
from jaxpar.comm.mesh import device_kind
from jaxpar.configuration import PACKAGES
from jaxpar.hooks import identity
from jaxpar.measure.ledger import read_ledger
from jaxpar.measure.memory import bytes_at_rest, memory_in_use, memory_profile, peak_memory, threads
from jaxpar.optimizer import Moments
from jaxpar.step import ShardedStep, TrainState, device_scalars


@dataclass(kw_only=True)
class Run:
    """What `train` sets up; to the record a `RecordedSide`.

    Attributes:
        mesh_devices: in the order of the mesh.
        gradients: of parameters and batch, for the ladder, of a peer whose step does not return them.
        step, loss: compiled; the loss is for evaluation. Ledger and memory are read from the step.
        initial_weights_sha256: of the weights as the devices first held them.
        moments: of the optimizer's state, which is these in all engines but a peer.
    """

    request: Request
    corpus: Corpus
    mesh_devices: list[jax.Device]
    sharded: ShardedStep
    state: TrainState
    step: jax.stages.Compiled
    loss: jax.stages.Compiled | None = None
    gradients: Callable[[Any, Any], Any] | None = None
    compile_s: float
    initial_weights_sha256: str
    moments: Callable[[Any], Moments] = identity

    def __post_init__(self) -> None:
        process = jax.process_index()
        self.devices: Collection[int] = [
            number for number, device in enumerate(self.mesh_devices) if device.process_index == process
        ]
        self.corpus_sha256 = self.corpus.sha256

    @property
    def experiment(self) -> Experiment:
        return self.request.experiment

    @property
    def order_T(self) -> np.ndarray:
        """The positions in the order of the devices that have them."""
        return order_of_positions(self.experiment.model.block_size, self.experiment.layout)

    def placed(self, arrays: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """A step's arrays (A, B, ...) over the devices, positions in the order of those that have them."""
        ordered = {name: x if name == "keys" else x[..., self.order_T] for name, x in arrays.items()}
        return spread(ordered, {name: self.sharded.batch[name] for name in ordered})

    def canonical(self, tree: Any) -> dict[str, np.ndarray]:
        """A tree like the parameters, fetched from the devices: canonical name -> full tensor."""
        return weights.to_canonical(self.sharded.unpad(tree), self.experiment.model)

    def memory(self) -> int:
        return memory_in_use(self.mesh_devices[min(self.devices)])

    def describe_non_finite(self) -> str:
        """The first weight that is infinite or NaN: gradients stay inside the step."""
        for name, weight in self.tensors(Rung.FINAL_WEIGHTS).items():
            if not np.isfinite(weight).all():
                return f"the first weight that is not finite after the step is {name}"
        return "every weight is finite after the step"

    def tensors(self, rung: Rung) -> Mapping[str, np.ndarray]:
        match rung:
            case Rung.BATCH:
                arrays = arrays_of_step(self.corpus, self.experiment, self.request.first_step)
                tokens = fetch(self.placed(arrays))
                back_T = self.order_T.argsort()
                return {name: x if name == "keys" else x[..., back_T] for name, x in tokens.items()}
            case Rung.ROUTING:
                experts_ALBTk = fetch(self.state.experts)[..., self.order_T.argsort(), :]
                return {"experts": np.ascontiguousarray(experts_ALBTk.swapaxes(0, 1))}
            case Rung.GRADIENTS | Rung.SECOND_GRADIENTS:
                tree = self.state.gradients
            case _ if rung in MOMENTS:
                tree = self.moments(self.state.opt_state)[MOMENTS[rung]]
            case _:
                tree = self.state.params
        return self.canonical(tree)

    def evaluate(self, step: int) -> Evaluation:
        compiled, state = self.loss, self.state
        assert compiled, "an experiment that evaluates nothing"

        def loss_of(inputs_ABT: np.ndarray, targets_ABT: np.ndarray) -> jax.Array:
            placed = self.placed({"inputs": inputs_ABT, "targets": targets_ABT})
            return compiled(state.params, state.opt_state, placed, device_scalars(self.experiment, state))

        return evaluate(self.experiment, self.corpus, step, loss_of)

    def should_stop(self) -> bool:
        return any(gathered([StopRequest.came]))

    def checkpoint_parts(self) -> Iterator[Part]:
        return state_parts(self.sharded, self.state, self.experiment.model)

    def manifest_fields(self, windows: Sequence[Window], recorder: Recorder | None) -> dict[str, Any]:
        peak_memory_bytes, peak_memory_method = peak_memory(self.step, self.mesh_devices)
        resident = bytes_at_rest(self.sharded, self.state, self.mesh_devices)
        costs = {
            "device_kind": device_kind(self.mesh_devices[0]),
            "initial_weights_sha256": self.initial_weights_sha256,
            "versions": versions(PACKAGES),
            "threads": threads(self.mesh_devices),
            "compile_s": self.compile_s,
            "cpu_time_s": sum(gathered([cpu_seconds()])),
            "peak_memory_bytes": peak_memory_bytes,
            "peak_memory_method": peak_memory_method,
            "resident_bytes": resident,
            "windows": list(windows),
            "hosts": hosts_of(self.mesh_devices),
        }
        if recorder:  # after the CPU time: reading a program is no part of the run
            hlo, axes = self.step.as_text(), self.experiment.layout.axes
            assert hlo, "XLA keeps no text of the compiled step"
            sizes = {name: resident[name][0] for name in ("parameters", "optimizer")}
            if profile := memory_profile(self.step, **sizes):
                recorder.leave(profile)
            recorder.leave(read_ledger(hlo, axes))
        if len(self.mesh_devices) > 1:
            held = local_shards(self.state.params, self.sharded.placements, self.experiment.model)
            texts = exchange(json.dumps(digests_of(held)))
            costs["replicas_apart"] = replicas_apart(digest for text in texts for digest in json.loads(text))
        return costs
