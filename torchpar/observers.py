"""Observers of one rank's training. All ranks have them, to put together what each found; rank 0 writes."""

import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from compare.contract.observers import Evaluating, Ladder, Observer, Observers, Steps
from compare.contract.progress import Progress
from compare.contract.record import Recorder
from compare.contract.request import MOMENTS, Rung
from compare.contract.saving import Saving
from compare.numerics.stream import arrays_of_step
from torchpar.checkpoint import state_parts
from torchpar.comm.silence import fall_silent
from torchpar.divergence import first_gradient_not_finite
from torchpar.evaluation import evaluate_weights
from torchpar.measure.instruments import Instruments
from torchpar.measure.memory import memory_in_use
from torchpar.on_device import to_device
from torchpar.state import Run
from torchpar.summary import Summary
from torchpar.weights import moment_keys, to_arrays


def observers_of(run: Run, folder: Path, *, started_utc: str) -> Observers:
    """What watches this rank's training, in the order in which it is told.

    Args:
        run: this rank's.
        folder: where rank 0 writes.
        started_utc: when this rank began.
    """
    request, experiment = run.request, run.experiment
    recorder = Recorder(folder) if run.rank.rank == 0 else None
    instruments, observers, watched = Instruments(run, recorder), list[Observer](), set[int]()
    if request.profile:
        from torchpar.measure.timeline import Profile  # what it marks is not imported for every run

        observers.append(profile := Profile(run, recorder, instruments))
        watched.add(profile.step)
    steps = Steps(
        request,
        recorder,
        memory=functools.partial(memory_in_use, run.mesh.device),
        where=functools.partial(first_gradient_not_finite, run),
        instrumented={instruments.step, *watched},
    )
    observers.append(steps)
    if request.ladder:
        observers.append(Ladder(request, recorder, functools.partial(tensors_of, run)))
    if experiment.train.eval_interval:
        observers.append(Evaluating(request, recorder, functools.partial(evaluate_weights, run)))
    if experiment.checkpoint.every:
        parts, sha256 = functools.partial(state_parts, run), run.corpus.sha256
        observers.append(Saving(request, folder, devices=[run.rank.rank], corpus_sha256=sha256, parts=parts))
    if request.silent:
        observers.append(Silence(run))
    return Observers([*observers, instruments, Summary(run, recorder, steps, instruments, started_utc)])


def tensors_of(run: Run, rung: Rung) -> Mapping[str, np.ndarray]:
    """The tensors of a rung by canonical name, put together from all ranks' pieces; {} but on rank 0."""
    parallel = run.parallel
    match rung:
        case Rung.BATCH:
            return first_batch(run)
        case Rung.GRADIENTS:
            pieces = parallel.gradients()
        case Rung.FIRST_M | Rung.FIRST_V:
            pieces = parallel.moments(moment_keys(run.experiment.optimizer)[MOMENTS[rung]])
        case _:
            pieces = parallel.weights()
    with run.mesh.traffic.paused():
        full = parallel.full(pieces)
    return to_arrays(full, run.experiment.model) if run.rank.rank == 0 else {}


def first_batch(run: Run) -> Mapping[str, np.ndarray]:
    """The batch of the first step as the devices have it, put together from all ranks' rows.

    Returns:
        inputs and targets, int32 (A, B, T), and with dropout keys, uint32 (A, B, 2).
    """
    batch = to_device(run, arrays_of_step(run.corpus, run.experiment, run.request.first_step))
    own = [tensor.cpu().numpy() for tensor in batch if tensor is not None]
    shares = run.mesh.data.all_gather_objects(own)
    arrays = (np.concatenate(parts, axis=1).astype(np.int32) for parts in zip(*shares, strict=True))
    named = dict(zip(("inputs", "targets", "keys"), arrays, strict=False))
    return {name: array.view(np.uint32) if name == "keys" else array for name, array in named.items()}


class Silence(Observer):
    """Silences a twin after its first step, in which wrappers still learn of the other ranks."""

    def __init__(self, run: Run):
        self._run = run

    def between(self, progress: Progress) -> None:
        """Fall silent."""
        run = self._run
        if progress.step == run.request.first_step + 1:
            fall_silent(run.mesh.axes, run.mesh.device, run.parallel.module)
