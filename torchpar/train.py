"""The training loop of both engines, as one rank runs it."""

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from compare.contract.communication import LOSS
from compare.contract.observers import FinishedStep, Observer
from compare.contract.request import Request
from compare.contract.timing import Stopwatch
from compare.numerics.evaluation import require_validation
from compare.numerics.stream import Batches, arrays_of_step
from compare.spec.axes import BATCH
from torchpar.checkpoint import restore_moments
from torchpar.comm import process_groups
from torchpar.comm.rank import Rank
from torchpar.loss_scale import undivided_parts, unscale_gradients
from torchpar.observers import observers_of
from torchpar.on_device import autocast, now, to_device
from torchpar.optimizer import optimizer_step
from torchpar.setup import agree_with_others, join_mesh, set_up
from torchpar.state import RankBatch, Run

Compute = Callable[[RankBatch], torch.Tensor]
Update = Callable[[], torch.Tensor]


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
        request: experiment, engine and observers of the run.
        folder: an existing one.
        weights, batches: see `entry.start_ranks`; the same on all ranks.

    Raises:
        DivergedError: the loss or the gradient norm of a step is not finite.
    """
    started_utc = datetime.now(UTC).isoformat(timespec="seconds")
    mesh = join_mesh(rank, request)
    if mesh.world.size > 1 and rank.rendezvous is None:
        agree_with_others(mesh, rank, request, folder)
    run = set_up(request, mesh, rank, weights=weights, batches=batches)
    if request.resume:
        restore_moments(run, Path(request.resume.checkpoint))
    require_validation(run.experiment, run.corpus)
    if run.parallel.compiled:
        run.compile_s = compile_ahead(run)
    tell = observers_of(run, folder, started_utc=started_utc)
    run_loop(run, functools.partial(compute_gradients, run), functools.partial(update_weights, run), tell)
    process_groups.leave_group()


def compile_ahead(run: Run) -> float:
    """Run the first pass once, and drop its gradients: what is traced and compiled is, before the first step.

    Returns:
        How long it took (s).
    """
    clock = Stopwatch(functools.partial(now, run))
    arrays = arrays_of_step(run.corpus, run.experiment, run.state.step)
    with clock, run.mesh.traffic.paused(), autocast(run):
        _, loss = run.parallel.module(*next(to_device(run, arrays).passes()))
        loss.backward()
    run.parallel.finish_gradient_synchronization()
    run.parallel.optimizer.zero_grad(set_to_none=True)
    return clock.wall_s


def run_loop(run: Run, compute: Compute, update: Update, tell: Observer) -> None:
    """Train to the end.

    Args:
        run: this rank's.
        compute: from a batch to the mean loss, a scalar; leaves the gradients on the parameters.
        update: clips, updates the weights and drops the gradients. Returns the norm before, a scalar.
        tell: the observers.

    Raises:
        DivergedError: the loss or the gradient norm of a step is not finite.
    """
    state = run.state
    tell.begin(state)
    while state.step < run.experiment.train.max_iters:
        if (steps := run.request.together(state.step)) > 1:
            train_window(run, compute, update, tell, steps=steps)
        else:
            train_step(run, compute, update, tell)
        tell.between(state)
    tell.finish()


def train_step(run: Run, compute: Compute, update: Update, tell: Observer) -> None:
    """Draw, compute, update, tell: one step, which the host waits for. What observers do costs no time."""
    start, clock = run.state.snapshot, Stopwatch(functools.partial(now, run))
    arrays = arrays_of_step(run.corpus, run.experiment, start.step)
    with tell.around(start.step):
        with clock:
            loss = compute(to_device(run, arrays))
        tell.gradients(start.step)
        with clock:
            norm = update()
    run.rank.at(start.step, "record")
    tell.steps([FinishedStep(start, loss, norm)], clock.window(1))
    move_on(run, norm)


def train_window(run: Run, compute: Compute, update: Update, tell: Observer, *, steps: int) -> None:
    """Steps with no synchronisation of host and device between them, timed together."""
    first, clock = run.state.step, Stopwatch(functools.partial(now, run))
    drawn = [arrays_of_step(run.corpus, run.experiment, step) for step in range(first, first + steps)]
    done = []
    with clock:
        for arrays in drawn:
            start, loss = run.state.snapshot, compute(to_device(run, arrays))
            norm = update()
            done.append(FinishedStep(start, loss, norm))
            move_on(run, norm)
    tell.steps(done, clock.window(steps))


def move_on(run: Run, norm: torch.Tensor) -> None:
    """Count a step whose gradients had this norm, (); drop gradients that overflowed.

    Raises:
        DivergedError: gradients overflow at the smallest loss scale; on all ranks alike.
    """
    norm_of = norm.item() if run.state.loss_scale else None
    if norm_of is not None and run.state.snapshot.overflowed(norm_of):
        run.parallel.optimizer.zero_grad(set_to_none=True)
    run.state.move_on(run.request.engine, run.experiment, grad_norm=norm_of)


def compute_gradients(run: Run, batch: RankBatch) -> torch.Tensor:
    """Forward, backward and synchronisation of one step: leaves the mean gradients on the parameters.

    Returns:
        The mean loss over the global batch, a scalar.
    """
    data = run.mesh.joined(*BATCH)
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


def run_passes(run: Run, batch: RankBatch) -> torch.Tensor:
    """Forward and backward of one pass after the other. Returns the mean loss, (), over this rank's rows."""
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


def update_weights(run: Run) -> torch.Tensor:
    """Clip the gradients, update the weights. Returns the norm before clipping, a scalar."""
    request, state = run.request, run.state
    run.rank.at(state.step, "optimizer")
    # In a window the host does not wait for a GPU, unless the loss scale needs the norm.
    is_timed = request.together(state.step) > 1
    waits = not is_timed or run.mesh.device.type == "cpu" or state.loss_scale is not None
    return optimizer_step(run.parallel, run.experiment.optimizer, state.updates, waits=waits)
