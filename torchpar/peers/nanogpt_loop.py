"""nanogpt-loop: one device, and the loop of nanoGPT's train.py: no container, no hook, nothing in between.

On a CPU it has as many threads as PyTorch takes by itself, as nanoGPT has: OMP_NUM_THREADS, or all cores.
Source: karpathy/nanoGPT, train.py.
"""

from contextlib import nullcontext

import torch
from torch import nn

from compare.numerics.optimizer import learning_rate
from compare.spec.experiment import Experiment
from torchpar.comm.mesh import Mesh
from torchpar.launch import Rank
from torchpar.model import GPT
from torchpar.optimizer import make_optimizer
from torchpar.parallel_model import ParallelModel
from torchpar.run import RankBatch, Run


def compute_gradients(run: Run, batch: RankBatch) -> torch.Tensor:
    """Forward and backward of every pass. Returns the mean loss, a scalar."""
    run.rank.at(run.state.step, "forward")
    half = run.experiment.precision.dtype == "bfloat16"
    losses = []
    for inputs_BT, targets_BT in zip(batch.inputs_ABT, batch.targets_ABT, strict=True):
        with torch.autocast(run.mesh.device.type, dtype=torch.bfloat16) if half else nullcontext():
            _, loss = run.parallel.module(inputs_BT, targets_BT)
            loss = loss / len(batch.inputs_ABT)
        loss.backward()
        losses.append(loss.detach())
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def update_weights(run: Run) -> torch.Tensor:
    """Clip, step, flush. Returns the norm () before clipping; nanoGPT finds it only in order to clip."""
    config, optimizer = run.experiment.optimizer, run.parallel.optimizer
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, run.state.step)
    norm = nn.utils.clip_grad_norm_(run.parallel.module.parameters(), config.grad_clip or float("inf"))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def parallelize(model: GPT, experiment: Experiment, *, mesh: Mesh, rank: Rank) -> tuple[ParallelModel, Mesh]:
    """The plain model and its optimizer; the mesh of one device."""
    parameters = dict(model.named_parameters())
    optimizer = make_optimizer(parameters, experiment)
    return ParallelModel(module=model, optimizer=optimizer, parameters=parameters), mesh
