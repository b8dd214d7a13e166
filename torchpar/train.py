"""The training loop of both engines, as one rank runs it, and the record that rank 0 leaves."""

import functools
import time
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from compare.contract.communication import GRADIENTS, LOSS
from compare.contract.divergence import end_if_diverged
from compare.contract.initial_weights import starting_parameters
from compare.contract.learning_rate import learning_rate
from compare.contract.parameters import fingerprint
from compare.contract.record import Recorder, Request, Step
from compare.contract.stream import Batches, open_stream
from torchpar import library, manual
from torchpar.comm import process_groups
from torchpar.comm.mesh import Mesh, make_mesh
from torchpar.comm.rank import Rank
from torchpar.divergence import first_gradient_not_finite
from torchpar.measure.ledger import CommunicationMode
from torchpar.measure.memory import resident_bytes, track_peak
from torchpar.model import GPT
from torchpar.optimizer import make_optimizer, optimizer_step
from torchpar.parallel_model import local
from torchpar.recording import Run, finish, record_after, record_gradients, record_start
from torchpar.weights import load_weights, read_weights

PARALLELIZE = {"torch-manual": manual.parallelize, "torch-library": library.parallelize}
# DDP sends its bucket order in step 1, once: step 2 is the first that is like all later ones.
INSTRUMENTED_STEP = 2


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
    """
    started_utc = datetime.now(UTC).isoformat(timespec="seconds")
    layout = request.experiment.layout
    device = torch.device("cuda", rank.local_rank) if request.platform == "gpu" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high" if request.experiment.precision.tf32 else "highest")
    if layout.devices > 1:
        process_groups.join_group(
            rank=rank.rank,
            world_size=layout.devices,
            device=device,
            rendezvous=rank.rendezvous,
            timeout_s=rank.collective_timeout_s,
        )
    rank.at(0, "setting up")
    mesh = make_mesh(layout, rank=rank.rank, device=device)
    run = set_up(request, mesh, rank, started_utc, weights=weights, batches=batches)
    recorder = Recorder(folder) if rank.rank == 0 else None
    if request.ladder:
        record_start(run, recorder, to_device(run, *run.corpus.batch(run.experiment, 0)))
    for step in range(request.experiment.train.max_iters):
        train_step(run, recorder, step)
    finish(run, recorder)
    if layout.devices > 1:
        process_groups.leave_group()


def set_up(
    request: Request,
    mesh: Mesh,
    rank: Rank,
    started_utc: str,
    *,
    weights: Mapping[str, np.ndarray] | None = None,
    batches: Batches | None = None,
) -> Run:
    """Model, optimizer and data of one rank, under the layout."""
    experiment = request.experiment
    dtype = torch.float64 if experiment.precision.dtype == "float64" else torch.float32
    model = GPT(experiment.model).to(device=mesh.device, dtype=dtype)
    load_weights(model, starting_parameters(request, weights))
    initial_weights_sha256 = fingerprint(read_weights(model))
    plan = PARALLELIZE[request.engine](
        model,
        mesh=mesh,
        layout=experiment.layout,
        make_optimizer=functools.partial(make_optimizer, experiment=experiment),
    )
    return Run(
        request=request,
        mesh=mesh,
        rank=rank,
        corpus=open_stream(request, batches),
        plan=plan,
        started_utc=started_utc,
        initial_weights_sha256=initial_weights_sha256,
    )


def train_step(run: Run, recorder: Recorder | None, step: int) -> None:
    """One optimizer step, timed in two halves so that what is recorded between them costs no time.

    Raises:
        DivergedError: the loss or the gradient norm is not finite.
    """
    batch = run.corpus.batch(run.experiment, step)
    instrumented = step == min(INSTRUMENTED_STEP, run.experiment.train.max_iters - 1)
    with instrument(run) if instrumented else nullcontext():
        start = _now(run)
        loss = compute_gradients(run, *to_device(run, *batch), step=step)
        gradients_s = _now(run) - start
        if step == 0 and run.request.ladder:
            record_gradients(run, recorder)
        if instrumented:
            run.gradient_bytes = resident_bytes(_gradients(run))
        start = _now(run)
        run.rank.at(step, "optimizer")
        norm = optimizer_step(run.plan, run.experiment.optimizer, step)
        seconds = gradients_s + _now(run) - start
    run.rank.at(step, "record")
    if step == 0:
        run.first_step_s = seconds
    done = Step(
        step=step,
        loss=loss.item(),
        grad_norm=norm.item(),
        lr=learning_rate(run.experiment.optimizer, step),
        step_time_ms=seconds * 1e3,
        instrumented=instrumented,
    )
    if recorder:
        recorder.step(done)
    # Loss and norm are the same on all ranks, which therefore end together.
    end_if_diverged(run.request.engine, done, where=lambda: first_gradient_not_finite(run))
    if run.request.ladder:
        record_after(run, recorder, step)


def compute_gradients(
    run: Run, inputs_ABT: torch.Tensor, targets_ABT: torch.Tensor, *, step: int
) -> torch.Tensor:
    """Forward, backward and synchronisation of one step: leaves the mean gradients on the parameters.

    Returns:
        The mean loss over the global batch, a scalar.
    """
    data = run.mesh.data
    if run.plan.run_pipeline:
        run.rank.at(step, "forward")
        loss = run.plan.run_pipeline(inputs_ABT, targets_ABT, functools.partial(autocast, run))
    else:
        loss = run_passes(run, inputs_ABT, targets_ABT, step=step)
    run.rank.at(step, "synchronisation")
    run.plan.finish_gradient_synchronization()
    if data.size > 1:
        data.all_reduce(loss, purpose=LOSS)
        loss /= data.size
    return loss


def run_passes(run: Run, inputs_ABT: torch.Tensor, targets_ABT: torch.Tensor, *, step: int) -> torch.Tensor:
    """Forward and backward of one pass after the other. Returns the mean loss over this rank's share."""
    passes = len(inputs_ABT)
    dtype = torch.float64 if run.experiment.precision.dtype == "float64" else torch.float32
    loss = torch.zeros((), dtype=dtype, device=run.mesh.device)
    for index, (inputs_BT, targets_BT) in enumerate(zip(inputs_ABT, targets_ABT, strict=True)):
        is_last = index == passes - 1
        with nullcontext() if is_last else run.plan.no_sync():  # reduce once a step
            run.rank.at(step, "forward")
            with autocast(run):
                _, mean = run.plan.module(inputs_BT, targets_BT)
            run.rank.at(step, "backward")
            backward(run, mean / passes)
        loss += mean.detach() / passes
    return loss


def backward(run: Run, share: torch.Tensor) -> None:
    """Add the gradients of one pass's share of the loss to those of the passes before it."""
    share.backward()


def to_device(run: Run, inputs_ABT: np.ndarray, targets_ABT: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of the global batch, on its device, as int64; the same for all ranks of tp."""
    data = run.mesh.data
    share = inputs_ABT.shape[1] // data.size
    rows = slice(data.rank * share, (data.rank + 1) * share)
    inputs, targets = (torch.from_numpy(array[:, rows]) for array in (inputs_ABT, targets_ABT))
    return inputs.to(run.mesh.device, torch.int64), targets.to(run.mesh.device, torch.int64)


def autocast(run: Run) -> AbstractContextManager:
    """bfloat16 mixed precision, as nanoGPT does it; else nothing.

    Without autocast's cache of cast weights: it would keep every weight that a sharded layout has freed.
    """
    if run.experiment.precision.dtype != "bfloat16":
        return nullcontext()
    return torch.autocast(run.mesh.device.type, dtype=torch.bfloat16, cache_enabled=False)


@contextmanager
def instrument(run: Run) -> Generator[None]:
    """Watch one step: peak memory, and the ledger. torch-manual's ledger comes from its own door."""
    plan, traffic = run.plan, run.mesh.traffic
    state = [t for entry in plan.optimizer.state.values() for t in entry.values() if torch.is_tensor(t)]
    modules = [*plan.module.parameters(), *plan.module.buffers()]
    resident = [*modules, *plan.parameters.values(), *state]
    traffic.clear()
    mode = CommunicationMode(run.mesh.axes, door=traffic, default_purpose=GRADIENTS)
    with track_peak(run.mesh.device, map(local, resident), plan.transient) as peak, mode:
        yield
    counted = mode.seen if run.request.engine == "torch-library" else traffic
    run.ledger = counted.ledger(run.mesh.sizes)
    run.peak_bytes = peak.bytes


def _gradients(run: Run) -> list[torch.Tensor]:
    """All that is allocated: a module may hold whole gradients of which this rank updates a piece."""
    parameters = [*run.plan.module.parameters(), *run.plan.parameters.values()]
    return [p.grad for p in parameters if p.grad is not None]


def _now(run: Run) -> float:
    if run.mesh.device.type == "cuda":
        torch.cuda.synchronize(run.mesh.device)
    return time.perf_counter()
