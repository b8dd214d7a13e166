"""A run: everything that it trains with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from compare.contract.request import Request
from compare.numerics.data import Corpus
from compare.numerics.stream import OwnBatches
from compare.spec.experiment import Experiment
from jaxpar import weights
from jaxpar.model import same
from jaxpar.optimizer import Moments
from jaxpar.step import ShardedStep, TrainState


@dataclass(kw_only=True)
class Run:
    """What `train` sets up, and observers ask.

    Attributes:
        devices: of the mesh, in order.
        sharded: between the trees on the devices and the model's shapes.
        step: compiled; the ledger and the memory are read from it.
        compile_s: how long it took to trace and compile.
        initial_weights_sha256: of the weights as the devices first held them.
        first: the same step, compiled to return the gradients, too; for the first step of a ladder.
        moments: of the optimizer's state, which is these in all engines but a peer.
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
    moments: Callable[[Any], Moments] = same

    @property
    def experiment(self) -> Experiment:
        """The experiment that is trained."""
        return self.request.experiment

    def program(self, number: int) -> jax.stages.Compiled:
        """The compiled step of this number."""
        return self.first if self.first and number == self.request.first_step else self.step

    def canonical(self, tree: Any) -> dict[str, np.ndarray]:
        """A tree like the parameters, fetched from the devices: canonical name -> full tensor."""
        return weights.to_canonical(self.sharded.unpad(tree), self.experiment.model)
