"""The training loop that both engines share: place, compile ahead, step, record.

Legend: A gradient accumulation, B batch, T position.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from compare.contract.data import Corpus
from compare.contract.divergence import end_if_diverged, first_not_finite
from compare.contract.engines import ENGINES
from compare.contract.experiment import Experiment, ExperimentError
from compare.contract.initial_weights import starting_parameters
from compare.contract.optimizer import StepScalars, step_scalars
from compare.contract.parameters import fingerprint, initial_parameters, parameter_count, storage_dtype
from compare.contract.record import Manifest, Recorder, Request, Rung, Step
from compare.contract.stream import Batches, OwnBatches, open_stream
from jaxpar import compiler, manual, weights
from jaxpar.comm.mesh import device_kind, make_mesh
from jaxpar.measure.ledger import communications
from jaxpar.measure.usage import cpu_seconds, peak_memory, resident_bytes, threads, versions
from jaxpar.model import make_loss, make_pieces
from jaxpar.optimizer import make_optimizer, moments, state_like
from jaxpar.problem import Problem
from jaxpar.remat import Remat, resolve_remat
from jaxpar.training_step import Plan

PARALLELIZE = {"jax-compiler": compiler.parallelize, "jax-manual": manual.parallelize}


@dataclass(kw_only=True)
class TrainState:
    """What a step turns into the next: both trees live on the devices and are donated."""

    params: Any
    opt_state: Any


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
        from compare.contract.record import Recorder, Request, read_record
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
    gradient_sync = ENGINES[request.engine].gradient_sync_for(layout)
    remat = resolve_remat(layout, engine=request.engine)
    mesh = make_mesh(layout, platform=request.platform)
    corpus = open_stream(request, batches)
    initial = starting_parameters(request, weights)
    progress()

    plan, state = prepare(request.engine, experiment, mesh=mesh, remat=remat, initial=initial)
    initial_weights = canonical_weights(plan, state, experiment)
    begun = time.perf_counter()
    step = compile_step(plan, state, experiment)
    compile_s = time.perf_counter() - begun
    progress()
    first = step
    if request.ladder:
        recorder.tensors(Rung.INITIAL_WEIGHTS, initial_weights)
        first = compile_step(plan, state, experiment, with_gradients=True)
        progress()
    first_step_s = loop(request, recorder, plan, state, corpus, first=first, step=step, progress=progress)

    hlo = step.as_text()
    assert hlo, "XLA keeps no text of the compiled step"
    devices = list(mesh.devices.flat)
    peak_memory_bytes, peak_memory_method = peak_memory(step, devices)
    manifest = Manifest(
        engine=request.engine,
        experiment=experiment,
        platform=request.platform,
        devices=len(devices),
        device_kind=device_kind(devices[0]),
        gradient_sync=gradient_sync,
        remat=remat,
        parameters=parameter_count(experiment.model),
        initial_weights_sha256=fingerprint(initial_weights),
        corpus_sha256=corpus.sha256,
        versions=versions(),
        threads=threads(devices),
        started_utc=started_utc,
        compile_s=compile_s,
        first_step_s=first_step_s,
        cpu_time_s=cpu_seconds(),
        peak_memory_bytes=peak_memory_bytes,
        peak_memory_method=peak_memory_method,
        resident_bytes={
            "parameters": resident_bytes(state.params, devices),
            "gradients": resident_bytes(gradients_at_rest(plan, state), devices),
            "optimizer": resident_bytes(state.opt_state, devices),
        },
    )
    recorder.finish(manifest, communications(hlo, mesh.shape))


def canonical_weights(plan: Plan, state: TrainState, experiment: Experiment) -> dict[str, np.ndarray]:
    """The weights by canonical name, read back from the devices."""
    return weights.to_canonical(plan.unpad(state.params), experiment.model)


def prepare(
    engine: str,
    experiment: Experiment,
    *,
    mesh: Mesh,
    remat: Remat,
    initial: Mapping[str, np.ndarray] | None = None,
) -> tuple[Plan, TrainState]:
    """The engine's step for an experiment, and the state at step 0, placed on the devices.

    Args:
        initial: weights by canonical name; by default the seed's.
    """
    model = experiment.model
    decay = weights.decay_mask(model, experiment.optimizer.decay)
    optimizer = make_optimizer(experiment.optimizer, decay=decay)
    problem = make_problem(experiment, remat=remat)
    plan = PARALLELIZE[engine](problem, optimizer, mesh=mesh, layout=experiment.layout)
    named = initial_parameters(experiment) if initial is None else initial
    params = jax.device_put(plan.pad(weights.from_canonical(named, model)), plan.params)
    moments = state_like(optimizer, params, plan.moments)
    opt_state = jax.jit(optimizer.init, out_shardings=moments)(params)
    return plan, TrainState(params=params, opt_state=opt_state)


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
    plan: Plan, state: TrainState, experiment: Experiment, *, with_gradients: bool = False
) -> jax.stages.Compiled:
    """Compile the plan's step ahead of time, its state donated.

    Args:
        with_gradients: also return the gradients, for the ladder; otherwise they never leave the step.
    """

    def step(params: Any, opt_state: Any, batch: Any, scalars: Any):
        params, opt_state, metrics, gradients = plan.step(params, opt_state, batch, scalars)
        return params, opt_state, metrics, gradients if with_gradients else None

    train = experiment.train
    shape_ABT = (train.gradient_accumulation_steps, train.batch_size, experiment.model.block_size)
    batch = dict.fromkeys(("inputs", "targets"), jax.ShapeDtypeStruct(shape_ABT, np.int32))
    moments = jax.tree.map(lambda leaf: leaf.sharding, state.opt_state)
    jitted = jax.jit(
        step,
        in_shardings=(plan.params, moments, plan.batch, plan.scalars),
        out_shardings=(plan.params, moments, plan.scalars, plan.moments if with_gradients else None),
        donate_argnums=(0, 1),
    )
    lowered = jitted.lower(state.params, state.opt_state, batch, device_scalars(experiment, 0))
    return lowered.compile(compiler_options=plan.compiler_options)


def loop(
    request: Request,
    recorder: Recorder,
    plan: Plan,
    state: TrainState,
    corpus: Corpus | OwnBatches,
    *,
    first: jax.stages.Compiled,
    step: jax.stages.Compiled,
    progress: Callable[..., None],
) -> float:
    """Run all steps, blocking on each. Returns the seconds of step 0.

    Args:
        first: runs step 0; with a ladder it also returns the gradients.
        step: runs every step after that.

    Raises:
        DivergedError: the loss or the gradient norm of a step is not finite.
    """
    experiment = request.experiment
    first_step_s, steps = 0.0, experiment.train.max_iters
    progress(in_step=True)
    for index in range(steps):
        inputs_ABT, targets_ABT = corpus.batch(experiment, index)
        scalars = device_scalars(experiment, index)
        run = first if index == 0 else step

        begun = time.perf_counter()
        batch = jax.device_put({"inputs": inputs_ABT, "targets": targets_ABT}, plan.batch)
        outputs = run(state.params, state.opt_state, batch, scalars)
        state.params, state.opt_state, metrics, gradients = jax.block_until_ready(outputs)
        seconds = time.perf_counter() - begun

        first_step_s = seconds if index == 0 else first_step_s
        done = Step(
            step=index,
            loss=float(metrics["loss"]),
            grad_norm=float(metrics["grad_norm"]),
            lr=step_scalars(experiment.optimizer, index).learning_rate,
            step_time_ms=seconds * 1e3,
        )
        recorder.step(done)
        end_if_diverged(request.engine, done, where=lambda: first_weight_not_finite(plan, state, experiment))
        if request.ladder:
            capture(request, recorder, plan, state, done=index + 1, batch=batch, gradients=gradients)
        progress(in_step=index + 1 < steps)
    return first_step_s


def first_weight_not_finite(plan: Plan, state: TrainState, experiment: Experiment) -> str:
    """A clause that names it; the gradients never leave the step, so it is what they made of the weights."""
    first = first_not_finite(canonical_weights(plan, state, experiment))
    if first:
        return f"the first weight that is not finite after the step is {first}"
    return "every weight is finite after the step"


def capture(
    request: Request,
    recorder: Recorder,
    plan: Plan,
    state: TrainState,
    *,
    done: int,
    batch: Any,
    gradients: Any,
) -> None:
    """Leave the ladder's tensors that exist after `done` steps, read back from the devices."""

    def write(rung: Rung, tree: Any) -> None:
        recorder.tensors(rung, weights.to_canonical(plan.unpad(tree), request.experiment.model))

    if done == 1:
        recorder.tensors(Rung.BATCH, jax.device_get(batch))
        write(Rung.GRADIENTS, gradients)
        write(Rung.FIRST_WEIGHTS, state.params)
        rungs = {"m": Rung.FIRST_M, "v": Rung.FIRST_V}
        for name, tree in moments(state.opt_state).items():
            write(rungs[name], tree)
    if done == request.later_step:
        write(Rung.LATER_WEIGHTS, state.params)


def gradients_at_rest(plan: Plan, state: TrainState) -> Any:
    """The accumulated gradients' shapes and shardings: they live inside a step and never leave it.

    What the plan asks for; that XLA does it is for tests to read from the loops of the compiled step.
    """
    return jax.tree.map(
        lambda w, sharding: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding),
        state.params,
        plan.accumulated,
    )


def device_scalars(experiment: Experiment, step: int) -> dict[str, np.ndarray]:
    """The optimizer's scalars of a step, rounded once to the dtype of the weights."""
    scalars: StepScalars = step_scalars(experiment.optimizer, step)
    dtype = storage_dtype(experiment)
    return {name: np.asarray(getattr(scalars, name), dtype) for name in scalars.__struct_fields__}
