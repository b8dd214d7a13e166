"""The programs that XLA compiles before training: the step, the step of a ladder, and the loss."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from compare.numerics.optimizer import step_scalars
from compare.numerics.parameters import storage_dtype
from compare.numerics.stream import shapes_of_step
from compare.side.recording import Progress
from compare.spec.experiment import Experiment
from jaxpar.engine import Engine


@dataclass(kw_only=True)
class TrainState(Progress):
    """Progress of a training, with parameters and optimizer state on the devices. A step donates both."""

    params: Any
    opt_state: Any
    gradients: Any = None
    """Gradients before clipping of a step that the ladder records; else None."""
    expert_ids: Any = None
    """Expert ids of such a step, (A, L, B, T, k)."""


def trace_train(engine: Engine, state: TrainState) -> Any:
    """Trace a training step: (params, opt_state, batch, scalars) -> (params, opt_state, metrics).

    Parameters and optimizer state are donated. Gradients and expert ids never leave the program.
    """

    def train(*arguments: Any) -> tuple[Any, Any, dict[str, jax.Array]]:
        params, opt_state, metrics, _ = engine.train_step(*arguments)
        return params, opt_state, {name: metrics[name] for name in metrics if name != "expert_ids"}

    returned = engine.shardings
    metrics = {name: sharding for name, sharding in returned.metrics.items() if name != "expert_ids"}
    out_shardings = returned.params, returned.opt_state, metrics
    jitted = jax.jit(train, out_shardings=out_shardings, donate_argnums=(0, 1))
    with jax.set_mesh(engine.mesh):
        return jitted.trace(*_arguments(engine, state))


def trace_ladder(engine: Engine, state: TrainState) -> Any:
    """Trace the step of a ladder. It also returns expert ids among the metrics, and gradients."""
    returned = engine.shardings
    out_shardings = returned.params, returned.opt_state, returned.metrics, returned.gradients
    jitted = jax.jit(engine.train_step, out_shardings=out_shardings, donate_argnums=(0, 1))
    with jax.set_mesh(engine.mesh):
        return jitted.trace(*_arguments(engine, state))


def trace_loss(engine: Engine, state: TrainState) -> Any:
    """Trace the mean loss of a batch without dropout. XLA removes the other work of the step."""

    def loss(*arguments: Any) -> jax.Array:
        return engine.train_step(*arguments)[2]["loss"]

    params, opt_state, batch, scalars = _arguments(engine, state)
    batch.pop("keys", None)
    jitted = jax.jit(loss, out_shardings=engine.shardings.scalar)
    with jax.set_mesh(engine.mesh):
        return jitted.trace(params, opt_state, batch, scalars)


def compile_program(engine: Engine, traced: Any) -> jax.stages.Compiled:
    """Compile a traced program with the options of its engine."""
    return compile_lowered(engine, traced.lower())


def compile_lowered(engine: Engine, lowered: Any) -> jax.stages.Compiled:
    """Compile a lowered program with the options of its engine."""
    return lowered.compile(compiler_options=engine.compiler_options)


def device_scalars(experiment: Experiment, progress: Progress) -> dict[str, np.ndarray]:
    """The next step's scalars, of optimizer and loss scale, rounded once to the dtype of the weights."""
    scalars = step_scalars(experiment.optimizer, progress.step, progress.updates)
    if progress.loss_scale:
        scalars["loss_scale"] = progress.loss_scale.scale
    dtype = storage_dtype(experiment)
    return {name: np.asarray(value, dtype) for name, value in scalars.items()}


def _arguments(engine: Engine, state: TrainState) -> tuple[Any, Any, dict[str, jax.ShapeDtypeStruct], Any]:
    """Arguments of a step to trace it with. The batch has shapes and shardings alone."""
    batch = {
        name: jax.ShapeDtypeStruct(*shape, sharding=engine.shardings.batch[name])
        for name, shape in shapes_of_step(engine.experiment).items()
    }
    return state.params, state.opt_state, batch, device_scalars(engine.experiment, state)
