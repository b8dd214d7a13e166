"""Evaluation on both splits, between steps."""

from collections.abc import Callable

import jax
import numpy as np

from compare.contract.record import Recorder
from compare.numerics.data import Corpus
from compare.numerics.evaluation import Evaluation, evaluate, is_due
from compare.numerics.stream import OwnBatches
from compare.spec.experiment import Experiment
from jaxpar.compilation import compile_evaluation, device_scalars
from jaxpar.state import TrainState
from jaxpar.training_step import ShardedStep


def make_evaluation(
    sharded: ShardedStep,
    state: TrainState,
    experiment: Experiment,
    *,
    corpus: Corpus | OwnBatches,
    recorder: Recorder,
) -> Callable[[], Evaluation | None]:
    """A function that evaluates the state's weights where that is due, and records it."""
    if not experiment.train.eval_interval:
        return lambda: None
    compiled, scalars = compile_evaluation(sharded, state, experiment), device_scalars(experiment, state)

    def loss_of(inputs: np.ndarray, targets: np.ndarray) -> jax.Array:
        placed = jax.device_put({"inputs": inputs, "targets": targets}, sharded.batch)
        return compiled(state.params, state.opt_state, placed, scalars)

    def evaluate_if_due() -> Evaluation | None:
        if not is_due(experiment, state.step):
            return None
        evaluation = evaluate(experiment, corpus, state.step, loss_of)
        recorder.evaluation(evaluation)
        return evaluation

    return evaluate_if_due
