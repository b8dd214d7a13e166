"""The training loop of both engines, as one rank runs it."""

import functools
import importlib
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from compare.contract.communication import LOSS
from compare.contract.inputs import open_stream, starting_parameters
from compare.contract.progress import Progress
from compare.contract.record import Recorder
from compare.contract.request import Request
from compare.contract.saving import Saving
from compare.contract.timing import Window
from compare.host.facts import cpu_seconds
from compare.numerics.evaluation import require_validation
from compare.numerics.parameters import fingerprint
from compare.numerics.stream import Batches, arrays_of_step
from compare.spec.engines.torch import TORCH
from torchpar.checkpoint import restore_moments, state_parts
from torchpar.comm import process_groups
from torchpar.comm.mesh import Mesh, make_mesh
from torchpar.comm.rank import Rank
from torchpar.comm.silence import fall_silent
from torchpar.evaluation import evaluate_if_due
from torchpar.host_memory import keep_freed_memory
from torchpar.loss_scale import scale_loss, undivided_parts, unscale_gradients
from torchpar.model import GPT
from torchpar.on_device import autocast, now, to_device
from torchpar.optimizer import make_optimizer, optimizer_step
from torchpar.recording import Recording
from torchpar.state import Batch, Run
from torchpar.weights import load_weights, read_weights

PARALLELIZE = {e.name: importlib.import_module(f"torchpar.{e.folder}").parallelize for e in TORCH.engines}


def train(
    rank: Rank,
    *,
    request: Request,
    folder: Path,
    weights: Mapping[str, np.ndarray] | None = None,
    batches: Batches | None = None,
) -> None:
    """Train as one of `layout.devices` ranks; rank 0 leaves the record in `folder`.

    Args:
        rank: this process.
        request: what to run.
        folder: there.
        weights, batches: see `entry.start_ranks`; the same on all ranks.

    Raises:
        DivergedError: the loss or the gradient norm of a step is not finite.
    """
    started_utc = datetime.now(UTC).isoformat(timespec="seconds")
    mesh = join_mesh(rank, request)
    run = set_up(request, mesh, rank, weights=weights, batches=batches)
    if request.resume:
        restore_moments(run, Path(request.resume.checkpoint))
    recording = Recording(run, Recorder(folder) if rank.rank == 0 else None, started_utc=started_utc)
    saving = Saving(
        request,
        folder,
        devices=[rank.rank],
        corpus_sha256=run.corpus.sha256,
        parts=functools.partial(state_parts, run),
    )
    if request.ladder:
        recording.begin(to_device(run, arrays_of_step(run.corpus, run.experiment, run.state.step)))
    require_validation(run.experiment, run.corpus)
    evaluate_if_due(run, recording)
    while run.state.step < run.experiment.train.max_iters:
        if request.silent and run.state.step == request.first_step + 1:
            fall_silent(run.mesh.axes, run.mesh.device, run.parallel.module)
        if request.timing and request.timing.is_in_window(run.state.step):
            train_window(run, recording, steps=request.timing.window)
        else:
            train_step(run, recording)
        evaluation = evaluate_if_due(run, recording)
        saving.step_is_done(run.state, evaluation)
    saving.finish()
    recording.finish()
    process_groups.leave_group()


def join_mesh(rank: Rank, request: Request) -> Mesh:
    """This rank's device, the group of all ranks if there are others, and the rank's place among them."""
    device, layout = _set_up_device(rank, request), request.experiment.layout
    if layout.devices > 1:
        process_groups.join_group(
            rank=rank.rank,
            world_size=layout.devices,
            device=device,
            rendezvous=rank.rendezvous,
            timeout_s=rank.collective_timeout_s,
        )
    rank.at(0, "setting up")
    return make_mesh(layout, rank=rank.rank, device=device, apart=request.silent)


def _set_up_device(rank: Rank, request: Request) -> torch.device:
    """This rank's device, and how PyTorch is to compute on it: one thread a rank, TF32 only if asked for."""
    device = torch.device("cuda", rank.local_rank) if request.platform == "gpu" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high" if request.experiment.precision.tf32 else "highest")
    return device


def set_up(
    request: Request,
    mesh: Mesh,
    rank: Rank,
    *,
    weights: Mapping[str, np.ndarray] | None = None,
    batches: Batches | None = None,
) -> Run:
    """Model, optimizer and data of one rank, under the layout."""
    experiment = request.experiment
    model, initial_weights_sha256 = starting_model(request, mesh.device, weights)
    parallel = PARALLELIZE[request.engine](
        model,
        mesh=mesh,
        layout=experiment.layout,
        make_optimizer=functools.partial(make_optimizer, experiment=experiment),
    )
    state = Progress(loss_scale=request.first_loss_scale)
    if state.loss_scale:
        scale_loss(model.loss, state, parts=undivided_parts(parallel, experiment))
    return Run(
        request=request,
        mesh=mesh,
        rank=rank,
        corpus=open_stream(request, batches),
        parallel=parallel,
        initial_weights_sha256=initial_weights_sha256,
        state=state,
    )


def starting_model(
    request: Request, device: torch.device, weights: Mapping[str, np.ndarray] | None
) -> tuple[GPT, str]:
    """The model on one device with the weights to begin with, and their fingerprint as it holds them."""
    experiment = request.experiment
    dtype = torch.float64 if experiment.precision.dtype == "float64" else torch.float32
    model = GPT(experiment.model, loss_chunks=experiment.train.loss_chunks).to(device=device, dtype=dtype)
    load_weights(model, starting_parameters(request, weights))
    return model, fingerprint(read_weights(model))


def train_step(run: Run, recording: Recording) -> None:
    """One optimizer step, timed in two halves, so that what is recorded between them costs no time.

    Raises:
        DivergedError: the loss or the gradient norm is not finite.
    """
    state = run.state
    arrays = arrays_of_step(run.corpus, run.experiment, state.step)
    with recording.watch_step():
        begun = now(run)
        loss = compute_gradients(run, to_device(run, arrays))
        gradients_s = now(run) - begun
        recording.gradients_are_ready()
        begun = now(run)
        run.rank.at(state.step, "optimizer")
        # A silent twin's numbers mean nothing: its norm must not keep it from an update.
        norm = optimizer_step(
            run.parallel, run.experiment.optimizer, state.updates, waits=not run.request.silent
        )
        update_s = now(run) - begun
    recording.step_is_done(loss, norm, seconds=gradients_s + update_s)
    move_on(run, norm)


def train_window(run: Run, recording: Recording, *, steps: int) -> None:
    """Steps with no synchronisation of host and device between them, timed together.

    Raises:
        DivergedError: the loss or the gradient norm of a step is not finite.
    """
    first = run.state.step
    drawn = [arrays_of_step(run.corpus, run.experiment, step) for step in range(first, first + steps)]
    done = []
    # A CPU computes in the call itself: there is nothing to wait for. For a loss scale the host must.
    waits = run.mesh.device.type == "cpu" or run.state.loss_scale is not None
    begun, cpu_begun = now(run), cpu_seconds()
    for arrays in drawn:
        place, loss = run.state.place, compute_gradients(run, to_device(run, arrays))
        run.rank.at(run.state.step, "optimizer")
        norm = optimizer_step(run.parallel, run.experiment.optimizer, run.state.updates, waits=waits)
        done.append((place, loss, norm))
        move_on(run, norm)
    window = Window(steps=steps, wall_s=now(run) - begun, cpu_s=cpu_seconds() - cpu_begun)
    recording.window_is_done(done, window)


def move_on(run: Run, norm: torch.Tensor) -> None:
    """After a step; one that overflowed has left its gradients, which go.

    Raises:
        DivergedError: gradients overflow at the smallest loss scale; on all ranks alike.
    """
    norm_of = norm.item() if run.state.loss_scale else None
    if norm_of is not None and run.request.silent:
        norm_of = 0.0  # it means nothing, and overflows nothing
    if norm_of is not None and run.state.place.overflowed(norm_of):
        run.parallel.optimizer.zero_grad(set_to_none=True)
    run.state.move_on(run.request.engine, run.experiment, grad_norm=norm_of)


def compute_gradients(run: Run, batch: Batch) -> torch.Tensor:
    """Forward, backward and synchronisation of one step: leaves the mean gradients on the parameters.

    Returns:
        The mean loss over the global batch, a scalar.
    """
    data = run.mesh.data
    if run.parallel.run_pipeline:
        run.rank.at(run.state.step, "forward")
        loss = run.parallel.run_pipeline(batch, functools.partial(autocast, run))
    else:
        loss = run_passes(run, batch)
    run.rank.at(run.state.step, "synchronisation")
    run.parallel.finish_gradient_synchronization()
    if run.state.loss_scale:
        scale = run.state.loss_scale.scale / undivided_parts(run.parallel, run.experiment)
        unscale_gradients(run.parallel, scale)
    if data.size > 1:
        data.all_reduce(loss, purpose=LOSS)
        loss /= data.size
    return loss


def run_passes(run: Run, batch: Batch) -> torch.Tensor:
    """Forward and backward of one pass after the other. Returns the mean loss over this rank's share."""
    passes = len(batch.inputs_ABT)
    dtype = torch.float64 if run.experiment.precision.dtype == "float64" else torch.float32
    loss = torch.zeros((), dtype=dtype, device=run.mesh.device)
    for index, one in enumerate(batch.passes()):
        is_last = index == passes - 1
        with nullcontext() if is_last else run.parallel.no_sync():  # reduce once a step
            run.rank.at(run.state.step, "forward")
            with autocast(run):
                _, mean = run.parallel.module(*one)
            run.rank.at(run.state.step, "backward")
            (mean / passes).backward()
        loss += mean.detach() / passes
    return loss
