"""AdamW and SGD as `compare.numerics.optimizer` defines them, by torch.optim; clipping by the global norm."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from compare.contract.communication import NORM
from compare.numerics.optimizer import CLIP_EPS, learning_rate
from compare.numerics.parameters import decays, parameter_table
from compare.spec.experiment import Experiment
from torchpar.comm.collectives import Axis
from torchpar.engine import Engine
from torchpar.offload import on_host
from torchpar.sharding import Sharding, local
from torchpar.weights import nanogpt_name

ROW = 4096
"""Elements whose squares are added up in one sum."""


def make_optimizer(
    parameters: Mapping[str, nn.Parameter],
    experiment: Experiment,
    *,
    wrap: Callable[..., torch.optim.Optimizer] | None = None,
    separate_groups: Collection[str] = (),
) -> torch.optim.Optimizer:
    """The experiment's optimizer over parameters, or shards of them (n,), by nanoGPT's names.

    The parameters are in two groups, with and without weight decay. The canonical table decides which, since
    a shard does not show whether it is part of a matrix. `wrap` makes the optimizer from (params,
    optimizer_cls, **options). Each name in `separate_groups` has a group of its own.
    """
    config = experiment.optimizer
    groups: dict[tuple[float, str], list[nn.Parameter]] = {}
    for row in parameter_table(experiment.model):
        weight_decay = config.weight_decay if decays(row, config.decay) else 0.0
        if (name := nanogpt_name(row.name)) in parameters:
            key = weight_decay, name if name in separate_groups else ""
            groups.setdefault(key, []).append(parameters[name])
    params = [{"params": group, "weight_decay": weight_decay} for (weight_decay, _), group in groups.items()]
    optimizer_cls: Any = torch.optim.SGD
    options: dict[str, Any] = {"momentum": config.momentum}
    if config.name == "adamw":
        optimizer_cls = torch.optim.AdamW
        options = {"betas": (config.beta1, config.beta2), "eps": config.eps}
    # Foreach kernels would allocate a temporary as large as the model.
    options |= {"lr": learning_rate(config, 0), "fused": True}
    if experiment.layout.offload == "optimizer":
        optimizer_cls = on_host(optimizer_cls)
    return wrap(params, optimizer_cls, **options) if wrap else optimizer_cls(params, **options)


@torch.no_grad()
def clip_gradients(engine: Engine, max_norm: float) -> torch.Tensor:
    """Scale all gradients to a global norm of at most `max_norm` (0: any). Returns the norm before, ().

    Gradients stay as they are if the norm is not finite.
    """
    norm = global_norm(engine.parameters, engine.sharding)
    gradients = [local(gradient) for gradient in engine.gradients().values()]
    if max_norm and gradients:
        scale = (max_norm / (norm + CLIP_EPS)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale.where(norm.isfinite(), 1.0))
    return norm


@torch.no_grad()
def global_norm(parameters: Mapping[str, torch.Tensor], sharding: Sharding) -> torch.Tensor:
    """The norm of all gradients over all elements of all ranks, each counted once: ()."""
    by_axes: dict[tuple[Axis, ...], list[torch.Tensor]] = {}
    for name, parameter in parameters.items():
        if name not in sharding.counted_elsewhere:
            axes = sharding.axes.get(name, ())
            if axes not in by_axes:
                by_axes[axes] = [local(parameter.detach()).new_zeros(())]
            if parameter.grad is not None:
                by_axes[axes].append(local(parameter.grad))
    norms = []
    # The stages of a pipeline have different parameters. All ranks must reduce in the same order.
    for axes, gradients in sorted(by_axes.items(), key=lambda group: [axis.name for axis in group[0]]):
        norm = norm_of_all(gradients)
        if axes:
            square = norm.square()
            for axis in axes:
                axis.all_reduce(square, purpose=NORM)
            norm = square.sqrt()
        norms.append(norm)
    return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]


def norm_of_all(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm over all elements of several tensors of any shape: ().

    On a CPU PyTorch adds up all squares of a float32 tensor in one sum (torch 2.13, also in
    `get_total_norm` and `clip_grad_norm_`). The norm of three million elements is then off by 7e-5, so the
    squares are added up in rows.
    """
    if tensors[0].device.type != "cpu":
        return torch.nn.utils.get_total_norm(tensors)
    norms = []
    for flat in (tensor.reshape(-1) for tensor in tensors):
        in_rows = flat.numel() // ROW * ROW
        rows = torch.linalg.vector_norm(flat[:in_rows].view(-1, ROW), dim=1)
        norms += [torch.linalg.vector_norm(part) for part in (rows, flat[in_rows:])]
    return torch.linalg.vector_norm(torch.stack(norms))
