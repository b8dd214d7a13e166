"""Training on one rank: `train` sets up and loops, `train_step` is one step. All engines share both."""

import importlib
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

from compare.contract.request import Request
from compare.contract.timing import Stopwatch
from compare.numerics.data import open_corpus
from compare.numerics.loss_scale import LARGEST
from compare.numerics.optimizer import learning_rate
from compare.numerics.stream import arrays_of_step
from compare.side.ending import StopRequest
from compare.side.inputs import weights_to_load
from compare.side.recording import Progress, Recording
from compare.spec.axes import DATA
from compare.spec.engines.registry import TORCH
from torchpar import compiler, library, manual
from torchpar.batch import RankBatch
from torchpar.checkpoint import fill_with, restore_moments
from torchpar.comm import process_groups
from torchpar.comm.mesh import make_mesh
from torchpar.host_memory import keep_freed_memory
from torchpar.launch import Rank
from torchpar.optimizer import clip_gradients
from torchpar.record import first_sha256, make_recording
from torchpar.run import Run, now
from torchpar.sharding import TensorsByName, local
from torchpar.weights import empty_model

MAKE_ENGINE = {
    "torch-manual": manual.make_engine,
    "torch-library": library.make_engine,
    "torch-compiler": compiler.make_engine,
}
PEERS = {peer.name: f"torchpar.{peer.folder}" for peer in TORCH.peers}
"""Modules with a `make_engine` and a `train_step` of their own; only a run of the peer imports them."""


def train(rank: Rank, *, request: Request, folder: Path) -> None:
    """Train as one of `layout.devices` ranks. Rank 0 writes the record into `folder`, an existing one.

    Raises DivergedError: the loss or the gradient norm of a step is not finite.
    """
    if request.experiment.checkpoint.every:
        StopRequest.listen()  # a forked rank listens already
    run = set_up(rank, request)
    if run.engine.compiled:
        run.compile_s = compile_ahead(run)
    recording = make_recording(run, folder)
    recording.begin(run.state)
    while run.state.step < run.experiment.train.max_iters:
        train_steps(run, recording)
        recording.between(run.state)
    recording.finish()
    rank.at(run.state.step, "the end")
    process_groups.leave_group()


def train_steps(run: Run, recording: Recording) -> None:
    """Run and record one step, or a timed window of steps. The host waits for the device once, at the end."""
    state, request, clock = run.state, run.request, Stopwatch(partial(now, run.mesh.device))
    first, steps = state.step, request.together(state.step)
    # The clock stops while gradients are recorded. In other steps the host must not wait for the device.
    pause = clock.paused if recording.records_gradients(first) else nullcontext

    def on_gradients() -> None:
        with pause():
            recording.gradients(state.step)

    drawn = [arrays_of_step(run.corpus, run.experiment, step) for step in range(first, first + steps)]
    done = []
    with recording.around(first), clock:
        for arrays in drawn:
            loss, norm = run.train_step(run, run.shard_batch(arrays), on_gradients)
            done.append(state.finish_step(loss, norm, run.tokens_per_expert))
            norm_of = norm.item() if state.loss_scale else None
            if state.advance(request.engine, run.experiment, grad_norm=norm_of):
                run.engine.optimizer.zero_grad(set_to_none=True)  # gradients that overflowed
    run.rank.at(first, "record")
    recording.steps(done, clock.window(steps))


def train_step(
    run: Run, batch: RankBatch, on_gradients: Callable[[], None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step: the gradients of the mean loss, clipping, and the update of the weights.

    In float16 backward begins with the loss times a scale, and the gradients are divided by it. Each rank
    begins with its share of the mean over all ranks, so the same steps overflow on every layout.

    `run.rank.at` is a heartbeat for the supervisor, and sends nothing.
    `on_gradients` is called when the gradients are complete, before clipping. Returns the mean loss and the
    norm before clipping, both (). If the norm is not finite, the gradients stay, and nothing is updated.
    """
    engine, state, config = run.engine, run.state, run.experiment.optimizer
    averaged = 1 if engine.loss_is_global else run.mesh.joined(*DATA).size  # losses, after backward
    scale = state.loss_scale.scale / averaged if state.loss_scale else 1.0

    # Forward and backward send the messages of tp, cp, ep, pp and ZeRO-3: the engine's modules make them. In
    # the last backward most engines also start to reduce gradients.
    with engine.step_context():
        loss = forward_backward(run, batch, scale)
    run.rank.at(state.step, "synchronisation")
    with torch.no_grad():
        # Wait for the reductions that backward started, and make the others: gradients are complete then.
        engine.finish_gradients()
        if state.loss_scale:
            unscale_gradients(engine.gradients(), scale, largest=LARGEST / state.loss_scale.scale)
        loss = run.mean_over_data(loss)  # an all-reduce of one number
    on_gradients()

    run.rank.at(state.step, "optimizer")
    norm = clip_gradients(engine, config.grad_clip)  # all-reduces of single numbers
    # In a timed window the host does not wait for a GPU, unless the loss scale depends on the norm.
    is_timed = run.request.is_in_window(state.step)
    waits = not is_timed or run.mesh.device.type == "cpu" or state.loss_scale is not None
    if not waits or norm.isfinite():
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate(config, state.step)
        # ZeRO-1, and torch-compiler's ZeRO-2, send the updated parameters here.
        engine.optimizer.step()
        engine.optimizer.zero_grad(set_to_none=True)
    return loss, norm


def unscale_gradients(gradients: TensorsByName, scale: float, *, largest: float) -> None:
    """Divide gradients by `scale`. An entry beyond `largest` becomes infinite: the step overflows."""
    for gradient in map(local, gradients.values()):
        gradient.div_(scale)
        gradient.masked_fill_(gradient.abs() > largest, math.inf)


def forward_backward(run: Run, batch: RankBatch, scale: float) -> torch.Tensor:
    """Forward and backward of every pass, of the loss times `scale`. Returns this rank's mean loss, ()."""
    engine, step, passes = run.engine, run.state.step, len(batch.inputs_ABT)
    if engine.run_pipeline:
        run.rank.at(step, "forward")
        return engine.run_pipeline(batch, run.autocast, scale)
    dtype = torch.float64 if run.experiment.precision.dtype == "float64" else torch.float32
    total = torch.zeros((), dtype=dtype, device=run.mesh.device)
    run.routing.clear()
    for number, inputs_targets_keys in enumerate(batch.passes()):
        # Passes before the last add up gradients. torch-compiler's ZeRO-2 and 3 scatter them in each pass.
        with engine.no_sync() if number < passes - 1 else nullcontext():
            run.rank.at(step, "forward")
            with run.autocast():
                _, loss = engine.module(*inputs_targets_keys)
            if run.balance:
                run.routing.append((run.balance.chosen_LBTk, run.balance.tokens_LE))
            total += loss.detach() / passes
            run.rank.at(step, "backward")
            (loss * scale / passes).backward()
    return total


def allow_kernels(attention: str) -> None:
    """Allow `scaled_dot_product_attention` all kernels (auto), or the fused ones alone (blockwise, fused)."""
    torch.backends.cuda.enable_math_sdp(attention not in ("blockwise", "fused"))


def set_up(rank: Rank, request: Request) -> Run:
    """Join the other ranks, and build the engine, filled with the first weights. Raises ExperimentError."""
    experiment = request.experiment
    if request.platform == "cpu":
        keep_freed_memory()
    if rank.world_size > 1 or request.engine not in PEERS:  # a peer has PyTorch's own number of threads
        torch.set_num_threads(1)
    allow_kernels(experiment.model.attention)
    torch.set_float32_matmul_precision("high" if experiment.precision.tf32 else "highest")
    if request.engine not in PEERS:  # products in 16 bits add up in float32, as XLA's do
        products = torch.backends.cuda.matmul
        products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = (
            False
        )
    device = process_groups.join_ranks(rank, request.platform, experiment if rank.local_rank == 0 else None)
    timeout = process_groups.patience(rank)
    mesh = make_mesh(experiment.layout, rank=rank.rank, device=device, timeout=timeout)
    first = weights_to_load(request)

    model, fill = empty_model(experiment, mesh.device), fill_with(first, experiment, mesh)
    peer = importlib.import_module(PEERS[request.engine]) if request.engine in PEERS else None
    make_engine = peer.make_engine if peer else MAKE_ENGINE[request.engine]
    run = Run(
        request=request,
        mesh=mesh,
        rank=rank,
        corpus=open_corpus(experiment, validated_sha256=request.corpus_sha256),
        engine=make_engine(model, experiment, mesh, fill),
        train_step=peer.train_step if peer else train_step,
        state=Progress(loss_scale=request.first_loss_scale),
        balance=model.balance,
    )
    if model.balance:
        model.balance.total_counts = run.total_over_data
    if rank.rank == 0:
        run.initial_weights_sha256 = first_sha256(run, first)
    if request.state:
        restore_moments(run, Path(request.state.checkpoint))
    return run


def compile_ahead(run: Run) -> float:
    """Compile by the passes of the first step, whose gradients are dropped. Returns the seconds it took."""
    clock = Stopwatch(partial(now, run.mesh.device))
    arrays = arrays_of_step(run.corpus, run.experiment, run.state.step)
    with clock, run.engine.step_context():
        forward_backward(run, run.shard_batch(arrays), 1.0)
        run.engine.finish_gradients()
    run.engine.optimizer.zero_grad(set_to_none=True)
    return clock.wall_s
