"""The record of a peer's loop: observers are told around its steps and never inside of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, SupportsFloat

import torch

from compare.contract.communication import LOSS
from compare.contract.observers import FinishedStep, Observer, Observers
from compare.contract.timing import Window
from compare.numerics.learning_rate import learning_rate
from compare.spec.axes import BATCH
from torchpar import train
from torchpar.observers import observers_of
from torchpar.state import RankBatch, Run


class Peer(Protocol):
    """One optimizer step in the two halves between which a ladder looks at the gradients."""

    def gradients(self, inputs_ABT: torch.Tensor, targets_ABT: torch.Tensor) -> torch.Tensor:
        """Forward and backward of every pass. Returns the mean loss over this rank's rows, a scalar."""
        ...

    def update(self, lr: float) -> torch.Tensor:
        """Clip, update the weights, drop the gradients. Returns the norm before clipping, a scalar."""
        ...


def follow(run: Run, peer: Peer, *, folder: Path, started_utc: str) -> None:
    """Train to the end, and leave the record in `folder`.

    Args:
        run: this rank's; its `parallel` is for the record alone.
        peer: takes the steps.
        folder: where rank 0 writes.
        started_utc: when this rank began.

    Raises:
        DivergedError: the loss or the gradient norm of a step is not finite.
    """

    def compute(batch: RankBatch) -> torch.Tensor:
        run.rank.at(run.state.step, "forward")
        return peer.gradients(batch.inputs_ABT, batch.targets_ABT)

    def update() -> torch.Tensor:
        return peer.update(learning_rate(run.experiment.optimizer, run.state.updates))

    train.run_loop(run, compute, update, MeanLosses(run, observers_of(run, folder, started_utc=started_utc)))


class MeanLosses(Observers):
    """Tells `observer` of losses over the global batch: a peer's step has only its own rows', and pays for no
    more."""

    def __init__(self, run: Run, observer: Observer):
        super().__init__([observer])
        self._run = run

    def steps(self, done: Sequence[FinishedStep], window: Window) -> None:
        """The means over the ranks, outside of the ledger."""
        super().steps([one._replace(loss=self._mean(one.loss)) for one in done], window)

    def _mean(self, loss: SupportsFloat) -> SupportsFloat:
        data = self._run.mesh.joined(*BATCH)
        assert isinstance(loss, torch.Tensor)
        if data.size == 1:
            return loss
        with self._run.mesh.traffic.paused():
            mean = loss.clone()
            data.all_reduce(mean, purpose=LOSS)
        return mean / data.size
