"""Compiling ahead of time: the training step, and the loss alone. A accumulation, B batch, T position."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from msgspec.structs import asdict

from compare.contract.progress import Progress
from compare.numerics.optimizer import step_scalars
from compare.numerics.parameters import storage_dtype
from compare.numerics.stream import shapes_of_step
from compare.spec.experiment import Experiment
from jaxpar.state import TrainState
from jaxpar.training_step import ShardedStep


def compile_step(
    sharded: ShardedStep,
    state: TrainState,
    experiment: Experiment,
    *,
    with_gradients: bool = False,
    see: Callable[[Any], None] = lambda program: None,
) -> jax.stages.Compiled:
    """Compile the sharded step ahead of time, its state donated.

    Args:
        with_gradients: also return the gradients, for the ladder; otherwise they never leave the step.
        see: called with the traced program (a ClosedJaxpr) before XLA has it.
    """

    def step(params: Any, opt_state: Any, batch: Any, scalars: Any):
        params, opt_state, metrics, gradients = sharded.step(params, opt_state, batch, scalars)
        return params, opt_state, metrics, gradients if with_gradients else None

    moments = _shardings(state.opt_state)
    outputs = (sharded.params, moments, sharded.scalars, sharded.moments if with_gradients else None)
    batch = batch_like(experiment)
    donated = {"out_shardings": outputs, "donate_argnums": (0, 1)}
    return _compile(step, sharded, state, experiment, batch, see=see, **donated)


def compile_evaluation(
    sharded: ShardedStep, state: TrainState, experiment: Experiment
) -> jax.stages.Compiled:
    """Compile the loss alone, without dropout; called as the step is.

    It is the training step of which only the loss is asked for: XLA leaves out the rest of it.
    """

    def loss(params: Any, opt_state: Any, batch: Any, scalars: Any) -> jax.Array:
        _, _, metrics, _ = sharded.step(params, opt_state, batch, scalars)
        return metrics["loss"]

    batch = batch_like(experiment, drops=False)
    return _compile(loss, sharded, state, experiment, batch, out_shardings=sharded.scalars)


def _compile(
    function: Callable[..., Any],
    sharded: ShardedStep,
    state: TrainState,
    experiment: Experiment,
    batch: Any,
    *,
    see: Callable[[Any], None] = lambda program: None,
    **options: Any,
) -> jax.stages.Compiled:
    """Compile a function of the step's arguments, which live where the step's do."""
    in_shardings = (sharded.params, _shardings(state.opt_state), sharded.batch, sharded.scalars)
    jitted = jax.jit(function, in_shardings=in_shardings, **options)
    traced = jitted.trace(state.params, state.opt_state, batch, device_scalars(experiment, state))
    see(traced.jaxpr)
    return traced.lower().compile(compiler_options=sharded.compiler_options)


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def batch_like(experiment: Experiment, *, drops: bool = True) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of one step's arrays, without data; without dropout's keys unless `drops`."""
    shapes = shapes_of_step(experiment)
    return {name: jax.ShapeDtypeStruct(*shapes[name]) for name in shapes if drops or name != "keys"}


def device_scalars(experiment: Experiment, progress: Progress) -> dict[str, np.ndarray]:
    """The next step's scalars: the optimizer's, and the loss scale if there is one.

    Rounded once to the dtype of the weights.
    """
    scalars = asdict(step_scalars(experiment.optimizer, progress.updates))
    if progress.loss_scale:
        scalars["loss_scale"] = progress.loss_scale.scale
    dtype = storage_dtype(experiment)
    return {name: np.asarray(value, dtype) for name, value in scalars.items()}
