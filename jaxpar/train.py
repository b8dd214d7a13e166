"""Training: set up a run, and loop. All three engines share it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from compare.checkpoint.description import WEIGHTS
from compare.checkpoint.reader import CheckpointReader
from compare.contract.record import Recorder
from compare.contract.request import Request
from compare.contract.timing import Stopwatch
from compare.numerics.boxes import Weights
from compare.numerics.data import open_corpus
from compare.numerics.optimizer import moment_names
from compare.numerics.parameters import SeedWeights, fingerprint, storage_dtype
from compare.numerics.stream import AHEAD, arrays_of_step
from compare.side.inputs import starting_parameters
from compare.side.recording import Recording
from compare.spec.experiment import Experiment
from jaxpar import compiler, explicit, manual, weights
from jaxpar.comm.hosts import meet, spread
from jaxpar.comm.mesh import make_mesh
from jaxpar.measure.profile import StepProfiler
from jaxpar.measure.work import work_of
from jaxpar.optimizer import make_optimizer, moments_like
from jaxpar.run import Run
from jaxpar.step import (
    ShardedStep,
    TrainState,
    compile_step,
    device_scalars,
    trace_step,
    with_moments_on_host,
)

PARALLELIZE = {
    "jax-compiler": compiler.parallelize,
    "jax-explicit": explicit.parallelize,
    "jax-manual": manual.parallelize,
}


def train(request: Request, folder: Path, *, at: Callable[[int, str], None] = lambda *_: None) -> None:
    """Train the request's experiment; its record is in `folder` then, which all processes reach.

    JAX is configured (`configuration`) before this module is imported. `at(step, phase)` is the
    heartbeat of the supervisor.

    Raises:
        ExperimentError: the experiment, or its data, cannot work.
        MissingDevicesError: fewer devices than the layout needs.
        DivergedError: a loss or a gradient norm is not finite; the record ends with that step.
    """
    recorder = Recorder(folder) if jax.process_index() == 0 else None
    train_to_end(set_up(request, recorder), recorder, folder, at)


def train_to_end(run: Run, recorder: Recorder | None, folder: Path, at: Callable[[int, str], None]) -> None:
    """All steps that are left. Raises DivergedError: a loss or a gradient norm is not finite."""
    state, last = run.state, run.experiment.train.max_iters
    profilers = [StepProfiler(run, recorder)] if run.request.profile and recorder else []
    tell = Recording(run, recorder, folder, profilers)
    at(state.step, "compute")
    tell.begin(state)
    while state.step < last:
        train_steps(run, tell)
        tell.between(state)
        at(state.step, "compute" if state.step < last else "the end")
    tell.finish()


def train_steps(run: Run, tell: Recording) -> None:
    """Draw, compute and update, tell: a step, or several of a window, waited for together at their end."""
    state, first, clock = run.state, run.state.step, Stopwatch()
    steps = run.request.together(first)
    drawn = [arrays_of_step(run.corpus, run.experiment, step) for step in range(first, first + steps)]
    done = []
    with tell.around(first), clock:
        for arrays in drawn:
            jax.block_until_ready(done[:-AHEAD])
            batch, scalars = run.placed(arrays), device_scalars(run.experiment, state)
            if run.gradients and run.request.update_due(state.step):
                state.gradients = run.gradients(state.params, batch)
            outputs = run.step(state.params, state.opt_state, batch, scalars)
            state.params, state.opt_state, metrics, *gradients = outputs
            if gradients and run.request.update_due(state.step):
                (state.gradients,), state.experts = gradients, metrics.get("experts")
            tokens_LE = metrics.get("tokens_per_expert")
            done.append(state.finish_step(metrics["loss"], metrics["grad_norm"], tokens_LE))
            # A loss scale follows from whether the step before overflowed: for it the host waits.
            norm = float(metrics["grad_norm"]) if state.loss_scale else None
            state.advance(run.request.engine, run.experiment, grad_norm=norm)
        jax.block_until_ready((state.params, state.opt_state, done, state.gradients))
    if state.gradients is not None:
        tell.gradients(first)
        state.gradients = None
    tell.steps(done, clock.window(steps))


def set_up(request: Request, recorder: Recorder | None) -> Run:
    """Place the state of a request on the devices, and compile its step. As of `train`."""
    experiment = request.experiment
    mesh = make_mesh(experiment.layout, platform=request.platform)
    corpus = open_corpus(experiment, validated_sha256=request.corpus_sha256)
    initial = starting_parameters(request)  # of a checkpoint nothing is read before it is asked for
    checkpoint = CheckpointReader(Path(request.resume.checkpoint)) if request.resume else None
    sharded, state = prepare(request.engine, experiment, mesh=mesh, initial=initial, checkpoint=checkpoint)
    state.loss_scale = request.first_loss_scale
    clock = Stopwatch()
    with clock:
        traced = trace_step(sharded, state, experiment, "state and gradients" if request.ladder else "state")
        if recorder:
            recorder.leave(work_of(traced.jaxpr, sharded.ticks))
        step = traced.lower().compile(compiler_options=sharded.compiler_options)
    run = Run(
        request=request,
        corpus=corpus,
        mesh_devices=list(mesh.devices.flat),
        sharded=sharded,
        state=state,
        step=step,
        loss=compile_step(sharded, state, experiment, "loss") if experiment.train.eval_interval else None,
        compile_s=clock.wall_s,
        initial_weights_sha256=request.init_sha256 if jax.process_count() > 1 else "",
    )
    if jax.process_index() == 0 and not run.initial_weights_sha256:
        # As the devices hold them; of several hosts, that nothing is sent, as they were given.
        first_weights = run.canonical(state.params) if jax.process_count() == 1 else initial
        run.initial_weights_sha256 = fingerprint(first_weights)
    meet("all have compiled")
    return run


def prepare(
    engine: str,
    experiment: Experiment,
    *,
    mesh: Mesh,
    initial: Weights | None = None,
    checkpoint: CheckpointReader | None = None,
) -> tuple[ShardedStep, TrainState]:
    """The engine's step for an experiment, and the state to begin with, placed on the devices.

    `initial` weights are the seed's by default; a checkpoint is a full state, to go on from.
    """
    decay = weights.decay_mask(experiment.model, experiment.optimizer.decay)
    optimizer = make_optimizer(experiment.optimizer, decay=decay)
    sharded = PARALLELIZE[engine](experiment, optimizer, mesh=mesh)
    if experiment.layout.offload == "optimizer":
        sharded = with_moments_on_host(sharded)
    dtype = storage_dtype(experiment)

    def placed(named: Mapping[str, np.ndarray], shardings: Any) -> dict[str, Any]:
        """Weights or moments on the devices, one leaf after the other: a tree like the parameters."""
        how, where = flatten_dict(sharded.placements), flatten_dict(shardings)
        paths = weights.parameters_by_path(experiment.model).items()
        leaves = (
            (path, weights.stacked(named, path, parameters).astype(dtype)) for path, parameters in paths
        )
        return unflatten_dict({path: spread(how[path].pad(leaf), where[path]) for path, leaf in leaves})

    if checkpoint:
        params, description = placed(checkpoint.group(WEIGHTS), sharded.params), checkpoint.description
        names = moment_names(experiment.optimizer)
        saved = {name: placed(checkpoint.group(name), sharded.moments) for name in names}
        step, updates = description.step, description.updates
        return sharded, TrainState(params=params, opt_state=saved, step=step, updates=updates)
    params = placed(SeedWeights(experiment) if initial is None else initial, sharded.params)
    moments = moments_like(optimizer, params, sharded.moments)
    opt_state = jax.jit(optimizer.init, out_shardings=moments)(params)
    return sharded, TrainState(params=params, opt_state=opt_state)
