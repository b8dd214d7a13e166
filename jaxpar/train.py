"""The training loop that both engines share."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import jax
import numpy as np

from compare.contract.observers import FinishedStep, Observer
from compare.contract.record import Recorder
from compare.contract.request import Request
from compare.contract.timing import Stopwatch
from compare.numerics.stream import Batches, arrays_of_step
from jaxpar.comm.hosts import spread
from jaxpar.compilation import device_scalars
from jaxpar.observers import observers_of
from jaxpar.setup import set_up
from jaxpar.state import Run

Take = Callable[[dict[str, jax.Array]], dict[str, jax.Array]]


def train(
    request: Request,
    recorder: Recorder | None,
    *,
    folder: Path | None = None,
    weights: Mapping[str, np.ndarray] | None = None,
    batches: Batches | None = None,
    progress: Callable[..., None] = lambda **_: None,
) -> None:
    """Train the request's experiment and write its record.

        from pathlib import Path
        from compare.numerics.data import open_corpus
        from compare.spec.experiment import load
        from compare.numerics.parameters import initial_parameters
        from compare.contract.record import Recorder, read_record
        from compare.contract.request import Request
        from jaxpar.configuration import configure_jax

        experiment, folder = load("check"), Path("mine")
        folder.mkdir()
        request = Request(engine="jax-manual", experiment=experiment)
        configure_jax(request)                          # before JAX is used
        from jaxpar.train import train

        weights = initial_parameters(experiment)        # or your own, by canonical name
        corpus = open_corpus(experiment)                # or your own batches
        train(request, Recorder(folder), weights=weights, batches=lambda step: corpus.batch(experiment, step))
        record = read_record(folder, requested=False)

    Args:
        request: experiment, engine and observers of the run.
        recorder: where to write; None in all processes but the first.
        folder: of the run, which all processes reach; by default the recorder's.
        weights: to begin with: canonical name -> array; see `checked_weights`. By default the request's.
        batches: step -> (inputs, targets), each int32 (A, B, T), checked at every step. By default those of
            the data.
        progress: called whenever something has been finished, with `in_step=True` if a step follows: the
            caller's watchdog.

    Raises:
        ExperimentError: the experiment, its data, or own weights or batches, cannot work.
        MissingDevicesError: fewer devices than the layout needs.
        DivergedError: a loss or a gradient norm is not finite; the record ends with that step.
    """
    started_utc = datetime.now(UTC).isoformat(timespec="seconds")
    folder = folder or (recorder.folder if recorder else None)
    if folder is None:
        raise ValueError("without a recorder give the folder of the run")
    run = set_up(request, recorder, weights=weights, batches=batches, progress=progress)

    def take(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        state, scalars = run.state, device_scalars(run.experiment, run.state)
        outputs = run.program(state.step)(state.params, state.opt_state, batch, scalars)
        state.params, state.opt_state, metrics, state.gradients = outputs
        return metrics

    run_loop(run, take, observers_of(run, recorder, folder, started_utc=started_utc), progress=progress)


def run_loop(run: Run, take: Take, tell: Observer, *, progress: Callable[..., None]) -> None:
    """Train to the end.

    Args:
        run: the training.
        take: a step, from a placed batch to loss and grad_norm, scalars; puts the new state into `run.state`.
        tell: the observers.
        progress: as of `train`.

    Raises:
        DivergedError: a loss or a gradient norm is not finite.
    """
    state, last = run.state, run.experiment.train.max_iters
    progress(in_step=True)
    tell.begin(state)
    while state.step < last:
        train_steps(run, take, tell)
        tell.between(state)
        progress(in_step=state.step < last)
    tell.finish()


def train_steps(run: Run, take: Take, tell: Observer) -> None:
    """Draw, compute and update, tell: a step, or several of a window, waited for together at their end."""
    state, first, clock = run.state, run.state.step, Stopwatch()
    steps = run.request.together(first)
    drawn = [arrays_of_step(run.corpus, run.experiment, step) for step in range(first, first + steps)]
    done = []
    with tell.around(first), clock:
        for arrays in drawn:
            start, metrics = state.snapshot, take(spread(arrays, run.sharded.batch))
            done.append(FinishedStep(start, metrics["loss"], metrics["grad_norm"]))
            # A loss scale follows from whether the step before overflowed: for it the host waits.
            norm = float(metrics["grad_norm"]) if state.loss_scale else None
            state.move_on(run.request.engine, run.experiment, grad_norm=norm)
        jax.block_until_ready((state.params, state.opt_state, done, state.gradients))
    if state.gradients is not None:
        tell.gradients(first)
        state.gradients = None
    tell.steps(done, clock.window(steps))
