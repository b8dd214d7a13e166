"""nanogpt-loop: one device, and the loop of nanoGPT's train.py: no container, no hook, nothing in between.

A gradient accumulation, B batch, T position. Source: karpathy/nanoGPT, train.py and GPT.configure_optimizers.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from torch import nn

from compare.contract.inputs import open_stream
from compare.contract.request import Request
from compare.numerics.stream import Batches
from compare.spec.experiment import Experiment, Optimizer
from torchpar.comm.rank import Rank
from torchpar.parallel_model import ParallelModel
from torchpar.peers.loop import follow
from torchpar.setup import join_mesh, starting_model
from torchpar.state import Run


class Loop:
    """nanoGPT's step.

    Args:
        model: called for logits and loss; compiled or not.
        optimizer: over its parameters.
        experiment: precision, and the norm to clip by.
        device: where it computes.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        experiment: Experiment,
        device: torch.device,
    ):
        self._model, self._optimizer = model, optimizer
        self._grad_clip = experiment.optimizer.grad_clip
        self._dtype, self._device = experiment.precision.dtype, device

    def gradients(self, inputs_ABT: torch.Tensor, targets_ABT: torch.Tensor) -> torch.Tensor:
        """Forward and backward of every pass. Returns the mean loss, a scalar."""
        losses = []
        for inputs_BT, targets_BT in zip(inputs_ABT, targets_ABT, strict=True):
            with self._autocast():
                _, loss = self._model(inputs_BT, targets_BT)
                loss = loss / len(inputs_ABT)
            loss.backward()
            losses.append(loss.detach())
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def update(self, lr: float) -> torch.Tensor:
        """Clip, step, flush. Returns the norm () before clipping; nanoGPT finds it only in order to clip."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        norm = nn.utils.clip_grad_norm_(self._model.parameters(), self._grad_clip or float("inf"))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def _autocast(self) -> AbstractContextManager:
        if self._dtype != "bfloat16":
            return nullcontext()
        return torch.autocast(self._device.type, dtype=torch.bfloat16)


def configure_optimizers(model: nn.Module, config: Optimizer) -> torch.optim.Optimizer:
    """The optimizer over two groups: matrices and embeddings decay, biases and norms do not; fused."""
    parameters = list(model.parameters())
    decays = [p.dim() >= 2 or config.decay == "all" for p in parameters]
    groups = [
        {
            "params": [p for p, decay in zip(parameters, decays, strict=True) if decay == wanted],
            "weight_decay": config.weight_decay if wanted else 0.0,
        }
        for wanted in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, fused=True)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.eps, fused=True)


def train(
    rank: Rank,
    *,
    request: Request,
    folder: Path,
    weights: Mapping[str, np.ndarray] | None = None,
    batches: Batches | None = None,
    compiled: bool = False,
) -> None:
    """Train on one device, and leave the record in `folder`. Arguments as of `torchpar.train.train`.

    On a CPU it has as many threads as PyTorch takes by itself, as nanoGPT has: OMP_NUM_THREADS, or all cores.

    Args:
        compiled: by torch.compile, in the first step.
    """
    started_utc = datetime.now(UTC).isoformat(timespec="seconds")
    experiment, threads = request.experiment, torch.get_num_threads()
    mesh = join_mesh(rank, request)
    torch.set_num_threads(threads)
    model, initial_weights_sha256 = starting_model(request, mesh.device, weights)
    optimizer = configure_optimizers(model, experiment.optimizer)
    run = Run(
        request=request,
        mesh=mesh,
        rank=rank,
        corpus=open_stream(request, batches),
        parallel=ParallelModel(module=model, optimizer=optimizer, parameters=dict(model.named_parameters())),
        initial_weights_sha256=initial_weights_sha256,
    )
    if compiled:
        model.compile()
    loop = Loop(model, optimizer, experiment=experiment, device=mesh.device)
    follow(run, loop, folder=folder, started_utc=started_utc)
