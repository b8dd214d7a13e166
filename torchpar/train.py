"""Training as one rank runs it: set up, then loop. All three engines share it, and the peers."""

import functools
import importlib
from contextlib import nullcontext
from pathlib import Path

import torch

from compare.contract.request import Request
from compare.contract.timing import Stopwatch
from compare.numerics.boxes import Weights
from compare.numerics.data import open_corpus
from compare.numerics.parameters import fingerprint, parameter_table
from compare.numerics.stream import arrays_of_step
from compare.side.ending import StopRequest
from compare.side.inputs import starting_parameters
from compare.side.recording import Progress, Recording
from compare.spec.engines.registry import TORCH
from torchpar import compiler, library, manual
from torchpar.comm import process_groups
from torchpar.comm.mesh import Mesh, make_mesh
from torchpar.host_memory import keep_freed_memory
from torchpar.launch import Rank
from torchpar.loss_scale import scale_loss, undivided_parts, unscale_gradients
from torchpar.observers import recording_of
from torchpar.optimizer import make_optimizer, optimizer_step
from torchpar.parallel_model import ParallelModel, local
from torchpar.run import RankBatch, Run, autocast, join_others, now, to_device
from torchpar.shards import empty_model, fill_with, restore_moments
from torchpar.weights import nanogpt_name, to_array

PARALLELIZE = {
    "torch-manual": manual.parallelize,
    "torch-library": library.parallelize,
    "torch-compiler": compiler.parallelize,
}
PEERS = {peer.name: f"torchpar.{peer.folder}" for peer in TORCH.peers}
"""Modules with their own `parallelize` and step; imported only to train: they may need more packages."""


def train(rank: Rank, *, request: Request, folder: Path) -> None:
    """Train as one of `layout.devices` ranks; rank 0 leaves the record in `folder`, an existing one.

    Raises DivergedError.
    """
    experiment = request.experiment
    if experiment.checkpoint.every:
        StopRequest.listen()  # a rank that was not forked does not yet
    if request.platform == "cpu":
        keep_freed_memory()
    if rank.world_size > 1 or request.engine not in PEERS:  # a plain loop has PyTorch's own threads
        torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high" if experiment.precision.tf32 else "highest")
    device = join_others(rank, request.platform, experiment if rank.local_rank == 0 else None)
    mesh = make_mesh(experiment.layout, rank=rank.rank, device=device)
    first = starting_parameters(request)
    run = set_up(request, mesh, rank, first)
    if rank.rank == 0:
        run.initial_weights_sha256 = _sha256_of(run.parallel, first, request)
    if request.resume:
        restore_moments(run, Path(request.resume.checkpoint))
    if run.parallel.compiled:
        run.compile_s = compile_ahead(run)
    train_to_end(run, recording_of(run, folder))
    process_groups.leave_group()


def set_up(request: Request, mesh: Mesh, rank: Rank, first: Weights) -> Run:
    """Model, optimizer and data of one rank, under the layout; the first weights by canonical name."""
    experiment, model = request.experiment, empty_model(request.experiment)
    fill, compute, update = fill_with(first, experiment, mesh), compute_gradients, update_weights
    if request.engine in PEERS:
        fill(model)
        peer = importlib.import_module(PEERS[request.engine])
        compute, update = peer.compute_gradients, peer.update_weights
        parallel, mesh = peer.parallelize(model, experiment, mesh=mesh, rank=rank)
    else:
        maker = functools.partial(make_optimizer, experiment=experiment)
        parallelize = PARALLELIZE[request.engine]
        parallel = parallelize(model, mesh=mesh, layout=experiment.layout, make_optimizer=maker, fill=fill)
    state = Progress(loss_scale=request.first_loss_scale)
    if state.loss_scale:
        for part in (model.loss, model.balance) if model.balance else (model.loss,):
            scale_loss(part, state, parts=undivided_parts(parallel, experiment))
    run = Run(
        request=request,
        mesh=mesh,
        rank=rank,
        corpus=open_corpus(experiment, validated_sha256=request.corpus_sha256),
        parallel=parallel,
        compute=compute,
        update=update,
        state=state,
        balance=model.balance,
    )
    if model.balance:
        model.balance.total_counts = run.total_over_data
    return run


def _sha256_of(parallel: ParallelModel, first: Weights, request: Request) -> str:
    """The SHA-256 of the first weights: as this rank holds them, or where it holds parts, as they were given.

    The second way reads one tensor after the other again.
    """
    rows = {row.name: row for row in parameter_table(request.experiment.model)}
    pieces, names = parallel.weights(), {name: nanogpt_name(name) for name in rows}
    if all(name in pieces and not parallel.sharded_over.get(name) for name in names.values()):
        return fingerprint(Weights(rows, lambda name: to_array(rows[name], local(pieces[names[name]]))))
    return request.init_sha256 or fingerprint(first)


def compile_ahead(run: Run) -> float:
    """Run the first pass once, and drop its gradients. Returns the seconds that this took."""
    clock = Stopwatch(functools.partial(now, run.mesh.device))
    arrays = arrays_of_step(run.corpus, run.experiment, run.state.step)
    with clock, autocast(run):
        _, loss = run.parallel.module(*next(to_device(run, arrays).passes()))
        loss.backward()
    run.parallel.finish_gradient_synchronization()
    run.parallel.optimizer.zero_grad(set_to_none=True)
    return clock.wall_s


def train_to_end(run: Run, tell: Recording) -> None:
    """All steps that are left. Raises DivergedError: the loss or the norm of a step is not finite."""
    state = run.state
    tell.begin(state)
    while state.step < run.experiment.train.max_iters:
        if run.request.is_in_window(state.step):
            train_window(run, tell, steps=run.request.together(state.step))
        else:
            train_step(run, tell)
        tell.between(state)
    tell.finish()


def train_step(run: Run, tell: Recording) -> None:
    """Draw, compute, update, tell: one step, which the host waits for. What observers do costs no time."""
    step, clock = run.state.step, Stopwatch(functools.partial(now, run.mesh.device))
    arrays = arrays_of_step(run.corpus, run.experiment, step)
    with tell.around(step):
        with clock:
            loss = run.compute(run, to_device(run, arrays))
        tell.gradients(step)
        with clock:
            norm = run.update(run)
    run.rank.at(step, "record")
    tell.steps([run.state.finished(loss, norm, run.tokens_per_expert)], clock.window(1))
    move_on(run, norm)


def train_window(run: Run, tell: Recording, *, steps: int) -> None:
    """Steps with no synchronisation of host and device between them, timed together."""
    first, clock = run.state.step, Stopwatch(functools.partial(now, run.mesh.device))
    drawn = [arrays_of_step(run.corpus, run.experiment, step) for step in range(first, first + steps)]
    done = []
    with clock:
        for step, arrays in enumerate(drawn, first):
            with tell.around(step):
                loss = run.compute(run, to_device(run, arrays))
                tell.gradients(step)
                norm = run.update(run)
            done.append(run.state.finished(loss, norm, run.tokens_per_expert))
            move_on(run, norm)
    tell.steps(done, clock.window(steps))


def move_on(run: Run, norm: torch.Tensor) -> None:
    """Count a step whose gradients had this norm, (); drop gradients that overflowed.

    Raises DivergedError, on all ranks alike: they overflow at the smallest loss scale.
    """
    norm_of = norm.item() if run.state.loss_scale else None
    if run.state.move_on(run.request.engine, run.experiment, grad_norm=norm_of):
        run.parallel.optimizer.zero_grad(set_to_none=True)


def compute_gradients(run: Run, batch: RankBatch) -> torch.Tensor:
    """Leave one step's mean gradients on the parameters. Returns its mean loss, a scalar."""
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
    return run.mean_over_data(loss)


def run_passes(run: Run, batch: RankBatch) -> torch.Tensor:
    """Forward and backward of one pass after the other. Returns the mean loss, (), over this rank's rows."""
    passes = len(batch.inputs_ABT)
    dtype = torch.float64 if run.experiment.precision.dtype == "float64" else torch.float32
    loss = torch.zeros((), dtype=dtype, device=run.mesh.device)
    run.routing.clear()
    for index, one in enumerate(batch.passes()):
        is_last = index == passes - 1
        with nullcontext() if is_last else run.parallel.no_sync():  # reduce once a step
            run.rank.at(run.state.step, "forward")
            with autocast(run):
                _, mean = run.parallel.module(*one)
            if run.balance:
                run.routing.append((run.balance.chosen_LBTk, run.balance.tokens_LE))
            run.rank.at(run.state.step, "backward")
            (mean / passes).backward()
        loss += mean.detach() / passes
    return loss


def update_weights(run: Run) -> torch.Tensor:
    """Clip the gradients, update the weights. Returns the norm before clipping, a scalar."""
    request, state = run.request, run.state
    run.rank.at(state.step, "optimizer")
    # In a window the host does not wait for a GPU, unless the loss scale needs the norm.
    is_timed = request.is_in_window(state.step)
    waits = not is_timed or run.mesh.device.type == "cpu" or state.loss_scale is not None
    return optimizer_step(run.parallel, run.experiment.optimizer, state.step, waits=waits)
