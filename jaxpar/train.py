"""The training loop that both engines share: place, compile ahead, step.

Legend: A gradient accumulation, B batch, T position.
"""

import functools
import importlib
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from compare.contract.checkpoint.description import WEIGHTS
from compare.contract.checkpoint.reader import CheckpointReader
from compare.contract.checkpoint.saving import Saving
from compare.contract.data import Corpus
from compare.contract.engines.jax import JAX
from compare.contract.engines.registry import ENGINES
from compare.contract.evaluation import Evaluation, evaluate, is_due, require_validation
from compare.contract.experiment import Experiment, ExperimentError, Model
from compare.contract.host.facts import cpu_seconds
from compare.contract.initial_weights import starting_parameters
from compare.contract.optimizer import StepScalars, step_scalars
from compare.contract.parameters import initial_parameters, storage_dtype
from compare.contract.record import Recorder
from compare.contract.request import Request
from compare.contract.stream import Batches, OwnBatches, open_stream
from compare.contract.timing import Window
from jaxpar import weights
from jaxpar.checkpoint import read_tree, state_parts
from jaxpar.comm.mesh import make_mesh
from jaxpar.model import make_loss, make_pieces
from jaxpar.optimizer import make_optimizer, moments, state_like, with_moments
from jaxpar.problem import Problem
from jaxpar.recording import Recording
from jaxpar.remat import Remat, resolve_remat
from jaxpar.state import TrainState
from jaxpar.training_step import ShardedStep

PARALLELIZE = {e.name: importlib.import_module(f"jaxpar.{e.folder}").parallelize for e in JAX.engines}


def train(
    request: Request,
    recorder: Recorder,
    *,
    weights: Mapping[str, np.ndarray] | None = None,
    batches: Batches | None = None,
    progress: Callable[..., None] = lambda **_: None,
) -> None:
    """Train the request's experiment and write its record.

        from pathlib import Path
        from compare.contract.data import open_corpus
        from compare.contract.experiment import load
        from compare.contract.parameters import initial_parameters
        from compare.contract.record import Recorder, read_record
        from compare.contract.request import Request
        from jaxpar.__main__ import configure_jax

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
        request: what to run.
        recorder: where to write.
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
    if request.engine not in PARALLELIZE:
        raise ExperimentError(f"engine = {request.engine}: jaxpar runs {', '.join(PARALLELIZE)}")
    experiment, layout = request.experiment, request.experiment.layout
    ENGINES[request.engine].require(layout, platform=request.platform)
    remat = resolve_remat(layout)
    mesh = make_mesh(layout, platform=request.platform)
    corpus = open_stream(request, batches)
    checkpoint, initial = None, None
    if request.resume:
        checkpoint = CheckpointReader(Path(request.resume.checkpoint))
    else:
        initial = starting_parameters(request, weights)
    progress()

    sharded, state = prepare(
        request.engine, experiment, mesh=mesh, remat=remat, initial=initial, checkpoint=checkpoint
    )
    saving = Saving(
        request,
        recorder.folder,
        devices=range(layout.devices),
        corpus_sha256=corpus.sha256,
        parts=lambda: state_parts(sharded, state, experiment.model),
    )
    recording = Recording(
        request, recorder, sharded=sharded, state=state, corpus=corpus, remat=remat, started_utc=started_utc
    )
    begun = time.perf_counter()
    step = compile_step(sharded, state, experiment)
    compile_s = time.perf_counter() - begun
    progress()
    evaluate_if_due = make_evaluation(sharded, state, experiment, corpus=corpus, recorder=recorder)
    progress()
    first = step  # with a ladder, one that also returns the gradients
    if request.ladder:
        first = compile_step(sharded, state, experiment, with_gradients=True)
        progress()

    progress(in_step=True)
    evaluate_if_due()
    while state.step < experiment.train.max_iters:
        run = first if state.step == request.first_step else step
        together = request.timing.together(state.step) if request.timing else 1
        drawn = [corpus.batch(experiment, state.step + ahead) for ahead in range(together)]
        train_steps(run, sharded, state, recording, experiment, drawn)
        evaluation = evaluate_if_due()
        saving.step_is_done(step=state.step, updates=state.updates, evaluation=evaluation)
        progress(in_step=state.step < experiment.train.max_iters)
    saving.finish()
    recording.finish(step, list(mesh.devices.flat), compile_s=compile_s)


def train_steps(
    step: jax.stages.Compiled,
    sharded: ShardedStep,
    state: TrainState,
    recording: Recording,
    experiment: Experiment,
    batches: list[tuple[np.ndarray, np.ndarray]],
) -> None:
    """Steps of the compiled program, one for each batch: blocked upon together at their end, and timed.

    Args:
        step: from `compile_step`.
        batches: inputs and targets of each step, int32 (A, B, T), on the host.

    Raises:
        DivergedError: the loss or the gradient norm of a step is not finite.
    """
    scalars = [device_scalars(experiment, state.updates + ahead) for ahead in range(len(batches))]
    metrics, placed, gradients = [], None, None
    begun, cpu_begun = time.perf_counter(), cpu_seconds()
    for batch, scalar in zip(batches, scalars, strict=True):
        placed = jax.device_put(dict(zip(("inputs", "targets"), batch, strict=True)), sharded.batch)
        outputs = step(state.params, state.opt_state, placed, scalar)
        state.params, state.opt_state, metric, gradients = outputs
        metrics.append(metric)
    jax.block_until_ready((state.params, state.opt_state, metrics, gradients))
    wall_s, cpu_s = time.perf_counter() - begun, cpu_seconds() - cpu_begun
    recording.steps_are_done(
        placed, metrics, gradients, Window(steps=len(batches), wall_s=wall_s, cpu_s=cpu_s)
    )
    state.step += len(batches)
    state.updates += len(batches)


def prepare(
    engine: str,
    experiment: Experiment,
    *,
    mesh: Mesh,
    remat: Remat,
    initial: Mapping[str, np.ndarray] | None = None,
    checkpoint: CheckpointReader | None = None,
) -> tuple[ShardedStep, TrainState]:
    """The engine's step for an experiment, and the state to begin with, placed on the devices.

    Args:
        initial: weights by canonical name; by default the seed's.
        checkpoint: a full state, to go on from.
    """
    model = experiment.model
    decay = weights.decay_mask(model, experiment.optimizer.decay)
    optimizer = make_optimizer(experiment.optimizer, decay=decay)
    problem = make_problem(experiment, remat=remat)
    sharded = PARALLELIZE[engine](problem, optimizer, mesh=mesh, layout=experiment.layout)
    if checkpoint:
        return sharded, _restored(checkpoint, sharded, optimizer, model)
    named = initial_parameters(experiment) if initial is None else initial
    params = jax.device_put(sharded.pad(weights.from_canonical(named, model)), sharded.params)
    moments = state_like(optimizer, params, sharded.moments)
    opt_state = jax.jit(optimizer.init, out_shardings=moments)(params)
    return sharded, TrainState(params=params, opt_state=opt_state)


def _restored(
    checkpoint: CheckpointReader,
    sharded: ShardedStep,
    optimizer: optax.GradientTransformationExtraArgs,
    model: Model,
) -> TrainState:
    """The state of a checkpoint under this layout."""
    read = functools.partial(read_tree, checkpoint, placements=sharded.placements, model=model)
    params = read(WEIGHTS, shardings=sharded.params)
    empty = jax.eval_shape(optimizer.init, params)
    found = {group: read(group, shardings=sharded.moments) for group in moments(empty)}
    return TrainState(
        params=params,
        opt_state=with_moments(empty, found),
        step=checkpoint.description.step,
        updates=checkpoint.description.updates,
    )


def make_problem(experiment: Experiment, *, remat: Remat) -> Problem:
    """nanoGPT as the engines see it: a loss that can be edited, and what its leaves' dims mean."""
    model, precision = experiment.model, experiment.precision
    _, shapes = make_loss(model, precision=precision, remat=remat)
    return Problem(
        build=lambda edit: make_loss(model, precision=precision, remat=remat, edit=edit)[0],
        pieces=lambda edit: make_pieces(model, precision=precision, remat=remat, edit=edit),
        shapes=shapes,
        axes=weights.logical_axes(model),
        remat=remat,
        stacked=weights.STACKED,
    )


def compile_step(
    sharded: ShardedStep, state: TrainState, experiment: Experiment, *, with_gradients: bool = False
) -> jax.stages.Compiled:
    """Compile the sharded step ahead of time, its state donated.

    Args:
        with_gradients: also return the gradients, for the ladder; otherwise they never leave the step.
    """

    def step(params: Any, opt_state: Any, batch: Any, scalars: Any):
        params, opt_state, metrics, gradients = sharded.step(params, opt_state, batch, scalars)
        return params, opt_state, metrics, gradients if with_gradients else None

    moments = jax.tree.map(lambda leaf: leaf.sharding, state.opt_state)
    jitted = jax.jit(
        step,
        in_shardings=(sharded.params, moments, sharded.batch, sharded.scalars),
        out_shardings=(sharded.params, moments, sharded.scalars, sharded.moments if with_gradients else None),
        donate_argnums=(0, 1),
    )
    lowered = jitted.lower(
        state.params, state.opt_state, batch_like(experiment), device_scalars(experiment, 0)
    )
    return lowered.compile(compiler_options=sharded.compiler_options)


def make_evaluation(
    sharded: ShardedStep,
    state: TrainState,
    experiment: Experiment,
    *,
    corpus: Corpus | OwnBatches,
    recorder: Recorder,
) -> Callable[[], Evaluation | None]:
    """A function that evaluates the state's weights where that is due, and records it.

    What is compiled is the training step of which only the loss is asked for: XLA leaves out the rest of it.

    Raises:
        ExperimentError: there is nothing to evaluate on.
    """
    require_validation(experiment, corpus)
    if not experiment.train.eval_interval:
        return lambda: None

    def loss(params: Any, opt_state: Any, batch: Any, scalars: Any) -> jax.Array:
        _, _, metrics, _ = sharded.step(params, opt_state, batch, scalars)
        return metrics["loss"]

    moments = jax.tree.map(lambda leaf: leaf.sharding, state.opt_state)
    jitted = jax.jit(
        loss,
        in_shardings=(sharded.params, moments, sharded.batch, sharded.scalars),
        out_shardings=sharded.scalars,
    )
    scalars = device_scalars(experiment, 0)
    lowered = jitted.lower(state.params, state.opt_state, batch_like(experiment), scalars)
    compiled = lowered.compile(compiler_options=sharded.compiler_options)

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


def batch_like(experiment: Experiment) -> dict[str, jax.ShapeDtypeStruct]:
    """A global batch without data."""
    train = experiment.train
    shape_ABT = (train.gradient_accumulation_steps, train.batch_size, experiment.model.block_size)
    return dict.fromkeys(("inputs", "targets"), jax.ShapeDtypeStruct(shape_ABT, np.int32))


def device_scalars(experiment: Experiment, updates: int) -> dict[str, np.ndarray]:
    """The optimizer's scalars after so many updates, rounded once to the dtype of the weights."""
    scalars: StepScalars = step_scalars(experiment.optimizer, updates)
    dtype = storage_dtype(experiment)
    return {name: np.asarray(getattr(scalars, name), dtype) for name in scalars.__struct_fields__}
