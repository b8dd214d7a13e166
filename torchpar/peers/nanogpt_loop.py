"""nanogpt-loop: one device, and the loop of nanoGPT's train.py, without sharding, hooks or records inside.

On a CPU it has as many threads as PyTorch takes by itself, as nanoGPT has: OMP_NUM_THREADS, or all cores.
Source: karpathy/nanoGPT, train.py.
"""

from collections.abc import Callable

import torch
from torch import nn

from compare.numerics.optimizer import learning_rate
from compare.spec.experiment import Experiment
from torchpar.batch import RankBatch
from torchpar.comm.mesh import Mesh
from torchpar.compilation import compile_forward, resolve_backend
from torchpar.engine import Engine, Fill
from torchpar.model import GPT
from torchpar.optimizer import make_optimizer
from torchpar.run import Run


def train_step(
    run: Run, batch: RankBatch, on_gradients: Callable[[], None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of nanoGPT's loop: see `torchpar.train.train_step`."""
    model, optimizer, config = run.engine.module, run.engine.optimizer, run.experiment.optimizer
    run.rank.at(run.state.step, "forward")
    losses = []
    for inputs_BT, targets_BT in zip(batch.inputs_ABT, batch.targets_ABT, strict=True):
        with run.autocast():
            _, loss = model(inputs_BT, targets_BT)
            loss = loss / len(batch.inputs_ABT)
        loss.backward()
        losses.append(loss.detach())
    on_gradients()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, run.state.step)
    # nanoGPT computes the norm only in order to clip.
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or float("inf"))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum(), norm


def make_engine(model: GPT, experiment: Experiment, mesh: Mesh, fill: Fill) -> Engine:
    """The plain model and its optimizer. nanoGPT's `compile` compiles the whole model.

    Raises ValueError: the layout names a backend that this machine does not have.
    """
    fill(model)
    parameters = dict(model.named_parameters())
    backend = (
        "none" if experiment.layout.compile == "auto" else resolve_backend(experiment.layout, mesh.device)
    )
    return Engine(
        module=model,
        optimizer=make_optimizer(parameters, experiment),
        parameters=parameters,
        compiled=None if backend == "none" else compile_forward(model, backend, experiment.layout),
    )
