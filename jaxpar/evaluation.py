"""Evaluation of the weights on both splits."""

from collections.abc import Callable

import jax
import numpy as np

from compare.numerics.evaluation import Evaluation, evaluate
from jaxpar.comm.hosts import spread
from jaxpar.compilation import compile_evaluation, device_scalars
from jaxpar.state import Run


def make_evaluation(run: Run) -> Callable[[int], Evaluation]:
    """A function, compiled here, that evaluates the weights after so many steps."""
    state, experiment = run.state, run.experiment
    compiled = compile_evaluation(run.sharded, state, experiment)
    scalars = device_scalars(experiment, state)

    def loss_of(inputs_ABT: np.ndarray, targets_ABT: np.ndarray) -> jax.Array:
        placed = spread({"inputs": inputs_ABT, "targets": targets_ABT}, run.sharded.batch)
        return compiled(state.params, state.opt_state, placed, scalars)

    return lambda step: evaluate(experiment, run.corpus, step, loss_of)
