"""Training: set up a run, and loop. All engines of jaxpar share it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from compare.checkpoint.description import WEIGHTS
from compare.checkpoint.reader import CheckpointReader
from compare.contract.request import Request
from compare.contract.timing import Stopwatch
from compare.contract.trace import write_trace
from compare.numerics.boxes import Weights
from compare.numerics.data import open_corpus
from compare.numerics.optimizer import moment_names
from compare.numerics.parameters import SeedWeights, storage_dtype
from compare.numerics.stream import AHEAD, arrays_of_step
from compare.side.inputs import weights_to_load
from compare.side.recording import Recording
from compare.spec.experiment import Experiment
from compare.spec.xla import xla_options
from jaxpar import compiler, explicit, manual, weights
from jaxpar.comm.hosts import barrier, put_sharded
from jaxpar.comm.mesh import make_mesh
from jaxpar.engine import Engine
from jaxpar.measure.trace import trace_step
from jaxpar.measure.work import work_of
from jaxpar.model import LossOf, loss_function
from jaxpar.optimizer import make_optimizer
from jaxpar.peers import plain_jit
from jaxpar.programs import TrainState, compile_program, device_scalars, trace_ladder, trace_loss, trace_train
from jaxpar.record import first_sha256, make_recording
from jaxpar.run import Run

ENGINES = {
    "jax-compiler": compiler.make_engine,
    "jax-explicit": explicit.make_engine,
    "jax-manual": manual.make_engine,
    "plain-jit": plain_jit.make_engine,
}


def train(request: Request, folder: Path, *, at: Callable[[int, str], None] = lambda *_: None) -> None:
    """Train the request's experiment. The record is in `folder` then, which all processes share.

    JAX is configured (`configuration`) before this module is imported. `at(step, phase)` is the
    heartbeat of the supervisor.

    Raises:
        ExperimentError: the experiment, or its data, cannot work.
        MissingDevicesError: fewer devices than the layout needs.
        DivergedError: a loss or a gradient norm is not finite. The record ends with that step.
    """
    run = set_up(request)
    recording, state, last = make_recording(run, folder), run.state, run.experiment.train.max_iters
    at(state.step, "compute")
    recording.begin(state)
    if request.trace:
        trace = trace_step(run, make_engine)
        if jax.process_index() == 0:
            write_trace(folder, run.experiment, *trace)
    while state.step < last:
        train_steps(run, recording)
        recording.between(state)
        at(state.step, "compute" if state.step < last else "the end")
    recording.finish()


def train_steps(run: Run, recording: Recording) -> None:
    """Run one step, or a timed window of steps: draw, dispatch, wait, record.

    The host waits for the devices at the end, and for a step that it is `AHEAD` of. In float16 it waits in
    every step.
    """
    state, first, clock = run.state, run.state.step, Stopwatch()
    steps = run.request.together(first)
    drawn = [arrays_of_step(run.corpus, run.experiment, step) for step in range(first, first + steps)]
    done = []
    with recording.around(first), clock:
        for arrays in drawn:
            jax.block_until_ready(done[:-AHEAD])
            # Put each device's rows and positions on it.
            batch, scalars = run.shard_batch(arrays), device_scalars(run.experiment, state)
            # `step.train_step`, compiled: all messages between devices are in it. The call returns at once.
            outputs = run.train_program(state.params, state.opt_state, batch, scalars)
            state.params, state.opt_state, metrics, *gradients = outputs
            if gradients and run.request.update_due(state.step):
                (state.gradients,), state.expert_ids = gradients, metrics.get("expert_ids")
            tokens_LE = metrics.get("tokens_per_expert")
            done.append(state.finish_step(metrics["loss"], metrics["grad_norm"], tokens_LE))
            # The next loss scale depends on whether this step overflowed: in float16 the host waits.
            norm = float(metrics["grad_norm"]) if state.loss_scale else None
            state.advance(run.request.engine, run.experiment, grad_norm=norm)
        jax.block_until_ready((state.params, state.opt_state, done, state.gradients))
    if state.gradients is not None:
        recording.gradients(first)
        state.gradients = None
    recording.steps(done, clock.window(steps))


def set_up(request: Request) -> Run:
    """Put the state of a request on the devices, and compile its programs. Raises as `train`."""
    experiment = request.experiment
    mesh = make_mesh(experiment.layout, platform=request.platform)
    corpus = open_corpus(experiment, validated_sha256=request.corpus_sha256)
    initial = weights_to_load(request)  # read or drawn tensor by tensor, when they are placed
    engine = make_engine(request.engine, experiment, mesh)
    if request.state:
        state = restore_state(engine, CheckpointReader(Path(request.state.checkpoint)))
    else:
        state = initial_state(engine, initial)
    state.loss_scale = request.first_loss_scale
    clock = Stopwatch()
    with clock:
        traced = trace_ladder(engine, state) if request.ladder else trace_train(engine, state)
        train_program = compile_program(engine, traced)
    evaluates = experiment.train.eval_interval
    run = Run(
        request=request,
        corpus=corpus,
        engine=engine,
        state=state,
        work=work_of(traced.jaxpr, engine.ticks),
        train_program=train_program,
        loss_program=compile_program(engine, trace_loss(engine, state)) if evaluates else None,
        compile_s=clock.wall_s,
        initial_weights_sha256=first_sha256(request, engine, state, initial),
    )
    barrier("all have compiled")
    return run


def make_engine(name: str, experiment: Experiment, mesh: Mesh, loss_of: LossOf = loss_function) -> Engine:
    """The engine of this name for an experiment. The mesh has the axes of the layout."""
    decay = weights.decay_mask(experiment.model, experiment.optimizer.decay)
    optimizer = make_optimizer(experiment.optimizer, decay=decay)
    engine = ENGINES[name](experiment, mesh, optimizer, loss_of)
    return replace(engine, compiler_options=engine.compiler_options | xla_options(experiment.layout))


def initial_state(engine: Engine, initial: Weights | None = None) -> TrainState:
    """The state before the first step, on the devices. By default the weights are the seed's."""
    named = SeedWeights(engine.experiment) if initial is None else initial
    params = put_tree(engine, named, engine.shardings.params)
    init = jax.jit(engine.optimizer.init, out_shardings=engine.shardings.opt_state)
    return TrainState(params=params, opt_state=init(params))


def restore_state(engine: Engine, checkpoint: CheckpointReader) -> TrainState:
    """The state of a checkpoint, on the devices."""
    where, names = engine.shardings, moment_names(engine.experiment.optimizer)
    moments = {name: put_tree(engine, checkpoint.group(name), where.opt_state[name]) for name in names}
    return TrainState(
        params=put_tree(engine, checkpoint.group(WEIGHTS), where.params),
        opt_state=moments,
        step=checkpoint.description.step,
        updates=checkpoint.description.updates,
    )


def put_tree(engine: Engine, named: Mapping[str, np.ndarray], shardings: Any) -> dict[str, Any]:
    """Weights or moments by canonical name, put on the devices leaf by leaf: a tree like the parameters."""
    placements, where = flatten_dict(engine.placements), flatten_dict(shardings)
    dtype, leaves = storage_dtype(engine.experiment), {}
    for path, parameters in weights.parameters_by_path(engine.experiment.model).items():
        leaf = weights.stack_layers(named, path, parameters).astype(dtype)
        leaves[path] = put_sharded(placements[path].pad(leaf), where[path])
    return unflatten_dict(leaves)
