"""Observers of a training in JAX."""

import functools
from collections.abc import Mapping

import jax
import numpy as np

from compare.contract.divergence import first_not_finite
from compare.contract.observers import Evaluating, Ladder, Observer, Observers, Steps
from compare.contract.record import Recorder
from compare.contract.request import MOMENTS, Rung
from compare.contract.saving import Saving
from compare.numerics.stream import arrays_of_step
from jaxpar.checkpoint import state_parts
from jaxpar.evaluation import make_evaluation
from jaxpar.measure.profile import Profile
from jaxpar.measure.usage import first_device, memory_in_use
from jaxpar.state import Run, canonical
from jaxpar.summary import Summary


def observers_of(run: Run, recorder: Recorder, *, started_utc: str) -> Observers:
    """What watches a training, in the order in which it is told.

    Args:
        run: what is trained.
        recorder: writes.
        started_utc: when the run began.
    """
    request, experiment, state = run.request, run.experiment, run.state
    observers, watched = list[Observer](), set[int]()
    if request.profile:
        observers.append(profile := Profile(run, recorder))
        watched.add(profile.step)
    steps = Steps(
        request,
        recorder,
        memory=lambda: memory_in_use(first_device(state.params)),
        where=functools.partial(first_weight_not_finite, run),
        instrumented=watched,
    )
    observers.append(steps)
    if request.ladder:
        observers.append(Ladder(request, recorder, functools.partial(tensors_of, run)))
    if experiment.train.eval_interval:
        observers.append(Evaluating(request, recorder, make_evaluation(run)))
    if experiment.checkpoint.every:
        saving = Saving(
            request,
            recorder.folder,
            devices=range(len(run.devices)),
            corpus_sha256=run.corpus.sha256,
            parts=lambda: state_parts(run.sharded, state, experiment.model),
        )
        observers.append(saving)
    return Observers([*observers, Summary(run, recorder, steps, started_utc)])


def tensors_of(run: Run, rung: Rung) -> Mapping[str, np.ndarray]:
    """The tensors of a rung as they are now, by canonical name."""
    state = run.state
    match rung:
        case Rung.BATCH:
            arrays = arrays_of_step(run.corpus, run.experiment, run.request.first_step)
            return jax.device_get(jax.device_put(arrays, run.sharded.batch))
        case Rung.GRADIENTS:
            tree = state.gradients
        case Rung.FIRST_M | Rung.FIRST_V:
            tree = run.moments(state.opt_state)[MOMENTS[rung]]
        case _:
            tree = state.params
    return canonical(run.sharded, tree, run.experiment)


def first_weight_not_finite(run: Run) -> str:
    """A clause that names it: gradients never leave the step, so it is what they made of the weights."""
    first = first_not_finite(canonical(run.sharded, run.state.params, run.experiment))
    if first:
        return f"the first weight that is not finite after the step is {first}"
    return "every weight is finite after the step"
