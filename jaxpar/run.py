"""A run: the data, engine, state and compiled programs of a training."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np

from compare.contract.request import Request
from compare.contract.work import ObservedWork
from compare.numerics.context import order_of_positions
from compare.numerics.data import Corpus
from compare.spec.experiment import Experiment
from jaxpar.comm.hosts import put_sharded
from jaxpar.engine import Engine
from jaxpar.programs import TrainState


@dataclass(kw_only=True)
class Run:
    """The result of `train.set_up`.

    Attributes:
        work: the work of the traced training step.
        train_program: the training step. The ledger and the memory profile are read from it.
        loss_program: the loss of an evaluation; None if the experiment evaluates nothing.
        initial_weights_sha256: the fingerprint of the first weights; "" on all processes but the first.
    """

    request: Request
    corpus: Corpus
    engine: Engine
    state: TrainState
    work: ObservedWork
    train_program: jax.stages.Compiled
    loss_program: jax.stages.Compiled | None
    compile_s: float
    initial_weights_sha256: str

    @property
    def experiment(self) -> Experiment:
        return self.request.experiment

    @property
    def devices(self) -> list[jax.Device]:
        """All devices, in the order of the mesh."""
        return list(self.engine.mesh.devices.flat)

    @cached_property
    def order_T(self) -> np.ndarray:
        """The positions of a sequence, in the order of the devices that have them."""
        return order_of_positions(self.experiment.model.block_size, self.experiment.layout)

    def shard_batch(self, arrays: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """A step's arrays (A, B, ...) over the devices, positions in the order of the devices."""
        ordered = {name: x if name == "keys" else x[..., self.order_T] for name, x in arrays.items()}
        return put_sharded(ordered, {name: self.engine.shardings.batch[name] for name in ordered})
