"""Set-up of one rank: its device and its place among all, the model under its layout, the data."""

import functools
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from compare.contract.inputs import open_stream, starting_parameters
from compare.contract.other_hosts import facts_here, leave_hosts, require_agreement
from compare.contract.progress import Progress
from compare.contract.request import Request
from compare.numerics.parameters import fingerprint, parameter_table
from compare.numerics.stream import Batches
from compare.numerics.weights import OneByOne, Weights
from compare.spec.engines.registry import TORCH
from torchpar.comm import process_groups
from torchpar.comm.devices import PACKAGES
from torchpar.comm.mesh import Mesh, make_mesh
from torchpar.comm.rank import Rank
from torchpar.first_weights import FirstWeights, empty_model
from torchpar.host_memory import keep_freed_memory
from torchpar.loss_scale import scale_loss, undivided_parts
from torchpar.model import GPT
from torchpar.optimizer import make_optimizer
from torchpar.parallel_model import ParallelModel, local
from torchpar.state import Run
from torchpar.weights import load_weights, nanogpt_name, read_weights, to_array

PARALLELIZE = {e.name: importlib.import_module(f"torchpar.{e.folder}").parallelize for e in TORCH.engines}


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
    return make_mesh(layout, rank=rank.rank, device=device)


def agree_with_others(mesh: Mesh, rank: Rank, request: Request, folder: Path) -> None:
    """Hold versions, data and clocks of all hosts against the first's; rank 0 leaves the hosts' names.

    Raises:
        ExperimentError: they differ; all ranks raise it.
    """
    found = mesh.world.all_gather_objects(
        facts_here(PACKAGES, reads=request.experiment if rank.local_rank == 0 else None)
    )
    remarks = require_agreement(found)
    if mesh.world.rank == 0:
        leave_hosts(folder, found)
        print(*remarks, sep="\n", end="\n" if remarks else "", file=sys.stderr, flush=True)


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
    first = starting_parameters(request, weights)
    run = spread_over(request, mesh, rank, first, batches=batches)
    if mesh.world.rank == 0:
        run.initial_weights_sha256 = _sha256_of(run.parallel, first, request)
    return run


def spread_over(
    request: Request, mesh: Mesh, rank: Rank, first: Weights, *, batches: Batches | None = None
) -> Run:
    """What `set_up` makes, with these first weights, of which nobody takes the SHA-256."""
    experiment, model = request.experiment, empty_model(request.experiment)
    parallel = PARALLELIZE[request.engine](
        model,
        mesh=mesh,
        layout=experiment.layout,
        make_optimizer=functools.partial(make_optimizer, experiment=experiment),
        fill=FirstWeights(first, experiment, mesh).fill,
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
        state=state,
    )


def _sha256_of(parallel: ParallelModel, first: Weights, request: Request) -> str:
    """The SHA-256 of the first weights: those that this rank holds, or if it holds parts those it was given.

    The second way reads one tensor after the other again.
    """
    rows = {row.name: row for row in parameter_table(request.experiment.model)}
    held, names = parallel.weights(), {name: nanogpt_name(name) for name in rows}
    if all(name in held and not parallel.sharded_over.get(name) for name in names.values()):
        return fingerprint(OneByOne(rows, lambda name: to_array(rows[name], local(held[names[name]]))))
    return request.init_sha256 or fingerprint(first)


def starting_model(
    request: Request, device: torch.device, weights: Mapping[str, np.ndarray] | None
) -> tuple[GPT, str]:
    """The model on one device with its first weights, full tensors by name, and their SHA-256."""
    model = empty_model(request.experiment).to_empty(device=device)
    model.transformer["wte"].weight = model.lm_head.weight  # tied again
    load_weights(model, starting_parameters(request, weights))
    return model, fingerprint(read_weights(model))
