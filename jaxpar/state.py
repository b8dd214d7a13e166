"""State of training, and the run that it belongs to."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from compare.contract.progress import Progress
from compare.contract.request import Request
from compare.numerics.data import Corpus
from compare.numerics.parameters import fingerprint, parameter_table
from compare.numerics.shards import Shard, assemble
from compare.numerics.stream import OwnBatches
from compare.numerics.weights import Weights
from compare.spec.experiment import Experiment, Model
from jaxpar import weights
from jaxpar.optimizer import moments
from jaxpar.shards import held
from jaxpar.training_step import ShardedStep


@dataclass(kw_only=True)
class TrainState(Progress):
    """Weights, moments, and how far training has come.

    Attributes:
        params, opt_state: trees that live on the devices; a step donates them.
        gradients: of the first step, for the ladder, synchronised and unclipped; else None.
    """

    params: Any
    opt_state: Any
    gradients: Any = None


@dataclass(kw_only=True)
class Run:
    """Everything that a run trains with.

    Attributes:
        devices: of the mesh, in order.
        sharded: between the trees on the devices and the model's own shapes.
        step: compiled; the ledger and the memory are read from it.
        compile_s: how long it took to trace and compile.
        initial_weights_sha256: of the weights as the devices first held them.
        first: the same step, compiled to return the gradients, too; for the first step of a ladder.
        moments: finds m and v in the optimizer's state.
    """

    request: Request
    corpus: Corpus | OwnBatches
    devices: list[jax.Device]
    sharded: ShardedStep
    state: TrainState
    step: jax.stages.Compiled
    compile_s: float
    initial_weights_sha256: str
    first: jax.stages.Compiled | None = None
    moments: Callable[[Any], dict[str, Any]] = moments

    @property
    def experiment(self) -> Experiment:
        """The experiment that is trained."""
        return self.request.experiment

    def program(self, number: int) -> jax.stages.Compiled:
        """The compiled step of this number."""
        return self.first if self.first and number == self.request.first_step else self.step


def canonical(sharded: ShardedStep, tree: Any, experiment: Experiment) -> dict[str, np.ndarray]:
    """A tree like the parameters, fetched from the devices: canonical name -> full tensor."""
    return weights.to_canonical(sharded.unpad(tree), experiment.model)


def sha256_of(sharded: ShardedStep, params: Any, first: Weights, request: Request) -> str:
    """The SHA-256 of the first weights: as the devices hold them, or on several hosts as they were given.

    One tensor after the other; the second way sends nothing, and only process 0 reads them again.
    """
    if jax.process_count() == 1:
        return fingerprint(Held(params, sharded.placements, request.experiment.model))
    return (request.init_sha256 or fingerprint(first)) if jax.process_index() == 0 else ""


class Held(Mapping[str, np.ndarray]):
    """What this process's devices hold, by canonical name: full tensors, put together when asked for.

    Args:
        tree: placed weights, gradients or moments, with the parameters' structure.
        placements: of its leaves.
        model: the sizes.
    """

    def __init__(self, tree: Any, placements: Any, model: Model):
        self._shapes = {row.name: row.shape for row in parameter_table(model)}
        self._parts: dict[str, list[tuple[Shard, np.ndarray]]] = {name: [] for name in self._shapes}
        for shard, values in held(tree, placements, model):
            if not shard.replica:
                self._parts[shard.name].append((shard, values))

    def __getitem__(self, name: str) -> np.ndarray:
        return assemble(self._shapes[name], self._parts[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)
