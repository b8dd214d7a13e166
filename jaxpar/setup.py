"""Set-up of a run: place its state on the devices, and compile its step ahead."""

import functools
import importlib
from collections.abc import Callable, Mapping
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
from compare.contract.timing import Stopwatch
from compare.numerics.evaluation import require_validation
from compare.numerics.parameters import SeedWeights, storage_dtype
from compare.numerics.stream import Batches
from compare.numerics.weights import Weights
from compare.spec.engines.registry import ENGINES, JAX
from compare.spec.experiment import Experiment, ExperimentError, Model
from jaxpar import weights
from jaxpar.checkpoint import place_weights
from jaxpar.comm.hosts import meet
from jaxpar.comm.mesh import make_mesh
from jaxpar.compilation import compile_step
from jaxpar.functional import make_loss, make_pieces
from jaxpar.measure.work import noted_ticks, work_of
from jaxpar.offload import with_moments_on_host
from jaxpar.optimizer import make_optimizer, moments, state_like, with_moments
from jaxpar.problem import Problem
from jaxpar.remat import Remat, resolve_remat
from jaxpar.state import Run, TrainState, sha256_of
from jaxpar.training_step import ShardedStep

PARALLELIZE = {e.name: importlib.import_module(f"jaxpar.{e.folder}").parallelize for e in JAX.engines}


def set_up(
    request: Request,
    recorder: Recorder | None,
    *,
    weights: Mapping[str, np.ndarray] | None = None,
    batches: Batches | None = None,
    progress: Callable[..., None],
) -> Run:
    """Check the request, place its state on the devices, and compile its step. As of `train`."""
    if request.engine not in PARALLELIZE:
        raise ExperimentError(f"engine = {request.engine}: jaxpar runs {', '.join(PARALLELIZE)}")
    experiment, layout = request.experiment, request.experiment.layout
    ENGINES[request.engine].require(layout)
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
    state.loss_scale = request.first_loss_scale
    clock = Stopwatch()
    with clock, noted_ticks() as ticks:
        step = compile_step(
            sharded,
            state,
            experiment,
            see=lambda program: recorder.work(work_of(program, ticks)) if recorder else None,
        )
    progress()
    run = Run(
        request=request,
        corpus=corpus,
        devices=list(mesh.devices.flat),
        sharded=sharded,
        state=state,
        step=step,
        compile_s=clock.wall_s,
        initial_weights_sha256=sha256_of(sharded, state.params, initial, request),
        first=compile_step(sharded, state, experiment, with_gradients=True) if request.ladder else None,
    )
    meet("all have compiled")
    return run


def prepare(
    engine: str,
    experiment: Experiment,
    *,
    mesh: Mesh,
    remat: Remat,
    initial: Weights | None = None,
    checkpoint: CheckpointReader | None = None,
) -> tuple[ShardedStep, TrainState]:
    """The engine's step for an experiment, and the state to begin with, placed on the devices.

    Args:
        initial: weights by canonical name; by default the seed's.
        checkpoint: a full state, to go on from.
    """
    model = experiment.model
    sharded, optimizer = sharded_step(engine, experiment, mesh=mesh, remat=remat)
    at_rest = sharded.moments_at_rest or sharded.moments
    if checkpoint:
        return sharded, _restored(checkpoint, sharded, optimizer, model, moments_at_rest=at_rest)
    first = SeedWeights(experiment) if initial is None else initial
    params = place_weights(
        first,
        placements=sharded.placements,
        shardings=sharded.params,
        model=model,
        dtype=storage_dtype(experiment),
    )
    opt_state = jax.jit(optimizer.init, out_shardings=state_like(optimizer, params, at_rest))(params)
    return sharded, TrainState(params=params, opt_state=opt_state)


def sharded_step(
    engine: str, experiment: Experiment, *, mesh: Mesh, remat: Remat
) -> tuple[ShardedStep, optax.GradientTransformationExtraArgs]:
    """The engine's step for an experiment, and its optimizer; nothing is placed on any device."""
    decay = weights.decay_mask(experiment.model, experiment.optimizer.decay)
    optimizer = make_optimizer(experiment.optimizer, decay=decay)
    problem = make_problem(experiment, remat=remat)
    sharded = PARALLELIZE[engine](problem, optimizer, mesh=mesh, layout=experiment.layout)
    if experiment.layout.offload == "optimizer":
        sharded = with_moments_on_host(sharded)
    return sharded, optimizer


def _restored(
    checkpoint: CheckpointReader,
    sharded: ShardedStep,
    optimizer: optax.GradientTransformationExtraArgs,
    model: Model,
    *,
    moments_at_rest: Any,
) -> TrainState:
    """The state of a checkpoint under this layout."""
    dtype = storage_dtype(checkpoint.description.experiment)
    read = functools.partial(place_weights, placements=sharded.placements, model=model, dtype=dtype)
    params = read(checkpoint.group(WEIGHTS), shardings=sharded.params)
    empty = jax.eval_shape(optimizer.init, params)
    found = {group: read(checkpoint.group(group), shardings=moments_at_rest) for group in moments(empty)}
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
