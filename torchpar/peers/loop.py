"""The record of a peer's loop: the observer is called around its steps and never inside of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from compare.contract.communication import LOSS
from compare.contract.record import Recorder
from compare.contract.timing import Window
from compare.host.facts import cpu_seconds
from compare.numerics.learning_rate import learning_rate
from compare.numerics.stream import arrays_of_step
from torchpar.on_device import now, to_device
from torchpar.recording import Recording
from torchpar.state import Run


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
    timing = run.request.timing
    recording = Recording(run, Recorder(folder) if run.rank.rank == 0 else None, started_utc=started_utc)
    if run.request.ladder:
        recording.begin(to_device(run, arrays_of_step(run.corpus, run.experiment, 0)))
    while run.state.step < run.experiment.train.max_iters:
        if timing and timing.is_in_window(run.state.step):
            _window(run, peer, recording, steps=timing.window)
        else:
            _step(run, peer, recording)
    recording.finish()


def _step(run: Run, peer: Peer, recording: Recording) -> None:
    """One step, waited for. What a ladder writes down between its halves costs no time."""
    state = run.state
    arrays = arrays_of_step(run.corpus, run.experiment, state.step)
    run.rank.at(state.step, "forward")
    with recording.watch_step():
        begun = now(run)
        loss = _gradients(run, peer, arrays)
        seconds = now(run) - begun
        recording.gradients_are_ready()
        begun = now(run)
        norm = peer.update(learning_rate(run.experiment.optimizer, state.updates))
        seconds += now(run) - begun
    recording.step_is_done(_mean_over_ranks(run, loss), norm, seconds=seconds)
    state.move_on(run.request.engine, run.experiment)


def _window(run: Run, peer: Peer, recording: Recording, *, steps: int) -> None:
    """Steps that are not waited for, timed together."""
    state = run.state
    numbers = range(state.step, state.step + steps)
    drawn = [arrays_of_step(run.corpus, run.experiment, step) for step in numbers]
    done = []
    begun, cpu_begun = now(run), cpu_seconds()
    for arrays in drawn:
        run.rank.at(state.step, "forward")
        loss = _gradients(run, peer, arrays)
        done.append((state.place, loss, peer.update(learning_rate(run.experiment.optimizer, state.updates))))
        state.move_on(run.request.engine, run.experiment)
    window = Window(steps=steps, wall_s=now(run) - begun, cpu_s=cpu_seconds() - cpu_begun)
    means = [(place, _mean_over_ranks(run, loss), norm) for place, loss, norm in done]
    recording.window_is_done(means, window)


def _gradients(run: Run, peer: Peer, arrays: Mapping[str, np.ndarray]) -> torch.Tensor:
    batch = to_device(run, arrays)
    return peer.gradients(batch.inputs_ABT, batch.targets_ABT)


def _mean_over_ranks(run: Run, loss: torch.Tensor) -> torch.Tensor:
    """The loss of the global batch: for the record, outside of the step and of the ledger."""
    data = run.mesh.data
    if data.size == 1:
        return loss
    with run.mesh.traffic.paused():
        mean = loss.clone()
        data.all_reduce(mean, purpose=LOSS)
    return mean / data.size
