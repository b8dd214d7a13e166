"""Set-up of one rank: its device and its place among all, the model under its layout, the data."""

import functools
import importlib
from collections.abc import Mapping

import numpy as np
import torch

from compare.contract.inputs import open_stream, starting_parameters
from compare.contract.progress import Progress
from compare.contract.request import Request
from compare.numerics.parameters import fingerprint
from compare.numerics.stream import Batches
from compare.spec.engines.torch import TORCH
from torchpar.comm import process_groups
from torchpar.comm.mesh import Mesh, make_mesh
from torchpar.comm.rank import Rank
from torchpar.host_memory import keep_freed_memory
from torchpar.loss_scale import scale_loss, undivided_parts
from torchpar.model import GPT
from torchpar.optimizer import make_optimizer
from torchpar.state import Run
from torchpar.weights import load_weights, read_weights

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
    """The model on one device with its first weights, full tensors by name, and their SHA-256."""
    experiment = request.experiment
    dtype = torch.float64 if experiment.precision.dtype == "float64" else torch.float32
    model = GPT(experiment.model, loss_chunks=experiment.train.loss_chunks).to(device=device, dtype=dtype)
    load_weights(model, starting_parameters(request, weights))
    return model, fingerprint(read_weights(model))
