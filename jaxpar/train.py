"""The training loop that both engines share: place, compile ahead, step."""

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

from compare.checkpoint.description import WEIGHTS
from compare.checkpoint.reader import CheckpointReader
from compare.contract.inputs import open_stream, starting_parameters
from compare.contract.record import Recorder
from compare.contract.request import Request
from compare.contract.saving import Saving
from compare.contract.timing import Window
from compare.host.facts import cpu_seconds
from compare.numerics.evaluation import require_validation
from compare.numerics.parameters import initial_parameters
from compare.numerics.stream import Batches, arrays_of_step
from compare.spec.engines.jax import JAX
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError, Model
from jaxpar import weights
from jaxpar.checkpoint import read_tree, state_parts
from jaxpar.comm.mesh import make_mesh
from jaxpar.compilation import compile_step, device_scalars
from jaxpar.evaluation import make_evaluation
from jaxpar.functional import make_loss, make_pieces
from jaxpar.measure.profile import profiling
from jaxpar.measure.work import noted_ticks
from jaxpar.offload import with_moments_on_host
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
        from compare.numerics.data import open_corpus
        from compare.spec.experiment import load
        from compare.numerics.parameters import initial_parameters
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
    ENGINES[request.engine].require_watchable(profile=request.profile, silent=request.silent)
    remat = resolve_remat(layout)
    mesh = make_mesh(layout, platform=request.platform)
    corpus = open_stream(request, batches)
    require_validation(experiment, corpus)
    initial = starting_parameters(request, weights)  # of a checkpoint nothing is read before it is asked for
    checkpoint = CheckpointReader(Path(request.resume.checkpoint)) if request.resume else None
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
        request, recorder, sharded=sharded, state=state, corpus=corpus, started_utc=started_utc
    )
    state.loss_scale = request.first_loss_scale
    begun = time.perf_counter()
    with noted_ticks() as ticks:
        see = functools.partial(recording.is_traced, ticks=ticks)
        step = compile_step(sharded, state, experiment, see=see)
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
        drawn = [arrays_of_step(corpus, experiment, state.step + ahead) for ahead in range(together)]
        with profiling(request, recorder, state.step, run, list(mesh.devices.flat)):
            train_steps(run, sharded, state, recording, experiment, drawn)
        state.evaluation = evaluate_if_due()
        if experiment.checkpoint.every:
            saving.between(state)
        progress(in_step=state.step < experiment.train.max_iters)
    saving.finish()
    recording.finish(step, list(mesh.devices.flat), compile_s=compile_s)


def train_steps(
    step: jax.stages.Compiled,
    sharded: ShardedStep,
    state: TrainState,
    recording: Recording,
    experiment: Experiment,
    batches: list[dict[str, np.ndarray]],
) -> None:
    """Steps of the compiled program, one for each batch: blocked upon together at their end, and timed.

    Args:
        step: from `compile_step`.
        batches: what each step is given (`arrays_of_step`), on the host.

    Raises:
        DivergedError: the loss or the gradient norm of a step is not finite.
    """
    done, placed, gradients = [], None, None
    begun, cpu_begun = time.perf_counter(), cpu_seconds()
    for batch in batches:
        place, scalars = state.place, device_scalars(experiment, state)
        placed = jax.device_put(batch, sharded.batch)
        outputs = step(state.params, state.opt_state, placed, scalars)
        state.params, state.opt_state, metrics, gradients = outputs
        done.append((place, metrics))
        # A loss scale follows from whether the step before overflowed: for it the host waits.
        norm = float(metrics["grad_norm"]) if state.loss_scale else None
        state.move_on(recording.engine, experiment, grad_norm=norm)
    jax.block_until_ready((state.params, state.opt_state, done, gradients))
    wall_s, cpu_s = time.perf_counter() - begun, cpu_seconds() - cpu_begun
    recording.steps_are_done(placed, done, gradients, Window(steps=len(batches), wall_s=wall_s, cpu_s=cpu_s))


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
    if experiment.layout.offload == "optimizer":
        sharded = with_moments_on_host(sharded)
    at_rest = sharded.moments_at_rest or sharded.moments
    if checkpoint:
        return sharded, _restored(checkpoint, sharded, optimizer, model, moments_at_rest=at_rest)
    named = initial_parameters(experiment) if initial is None else initial
    params = jax.device_put(sharded.pad(weights.from_canonical(named, model)), sharded.params)
    opt_state = jax.jit(optimizer.init, out_shardings=state_like(optimizer, params, at_rest))(params)
    return sharded, TrainState(params=params, opt_state=opt_state)


def _restored(
    checkpoint: CheckpointReader,
    sharded: ShardedStep,
    optimizer: optax.GradientTransformationExtraArgs,
    model: Model,
    *,
    moments_at_rest: Any,
) -> TrainState:
    """The state of a checkpoint under this layout."""
    read = functools.partial(read_tree, checkpoint, placements=sharded.placements, model=model)
    params = read(WEIGHTS, shardings=sharded.params)
    empty = jax.eval_shape(optimizer.init, params)
    found = {group: read(group, shardings=moments_at_rest) for group in moments(empty)}
    return TrainState(
        params=params,
        opt_state=with_moments(empty, found),
        step=checkpoint.description.step,
        updates=checkpoint.description.updates,
    )


def make_problem(experiment: Experiment, *, remat: Remat) -> Problem:
    """nanoGPT as the engines see it: a loss that can be edited, and what its leaves' dims mean."""
    model, precision = experiment.model, experiment.precision
    build = functools.partial(
        make_loss, model, precision=precision, remat=remat, loss_chunks=experiment.train.loss_chunks
    )
    return Problem(
        build=lambda edit: build(edit=edit)[0],
        pieces=lambda edit: make_pieces(model, precision=precision, remat=remat, edit=edit),
        shapes=build()[1],
        axes=weights.logical_axes(model),
        remat=remat,
        stacked=weights.STACKED,
    )
