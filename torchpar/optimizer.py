"""AdamW and SGD as `compare.numerics.optimizer` defines them, by torch.optim; the norm over all ranks."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from compare.contract.communication import NORM
from compare.numerics.optimizer import CLIP_EPS, learning_rate
from compare.numerics.parameters import decays, parameter_table
from compare.spec.experiment import Experiment, Optimizer
from torchpar.comm.collectives import Axis
from torchpar.offload import on_host
from torchpar.parallel_model import ParallelModel, local
from torchpar.weights import nanogpt_name

ROW = 4096
"""Elements whose squares are added up one after the other."""


def make_optimizer(
    parameters: Mapping[str, nn.Parameter],
    experiment: Experiment,
    *,
    wrap: Callable[..., torch.optim.Optimizer] | None = None,
    separate_groups: Collection[str] = (),
) -> torch.optim.Optimizer:
    """The experiment's optimizer over parameters by nanoGPT's names, in two groups: what decays or not.

    What decays comes from the canonical table: parameters may be pieces (n,), and of a pipeline some. `wrap`
    makes the optimizer from (params, optimizer_cls, **kwargs), if that is not as usual. The names in
    `separate_groups` get a group of their own. Foreach kernels would make a temporary as large as the model.
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
    options |= {"lr": learning_rate(config, 0), "fused": True}
    if experiment.layout.offload == "optimizer":
        optimizer_cls = on_host(optimizer_cls)
    return wrap(params, optimizer_cls, **options) if wrap else optimizer_cls(params, **options)


def optimizer_step(
    parallel: ParallelModel, config: Optimizer, step: int, *, waits: bool = True
) -> torch.Tensor:
    """Clip by the global norm, update the weights, and drop the gradients. Returns the norm before, ().

    A norm that is not finite is only returned, if the host `waits` for a GPU to look at it; else the weights
    are lost, and who reads it later ends the run. The learning rate is that of `step`, from 0.
    """
    norm = gradient_norm(parallel.parameters, parallel.sharded_over, copies=parallel.copies)
    if waits and not norm.isfinite():
        return norm
    scale_gradients(parallel.parameters, norm, max_norm=config.grad_clip)
    for group in parallel.optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    parallel.optimizer.step()
    parallel.optimizer.zero_grad(set_to_none=True)
    return norm


@torch.no_grad()
def scale_gradients(parameters: Mapping[str, torch.Tensor], norm: torch.Tensor, *, max_norm: float) -> None:
    """Scale all gradients, whose norm is `norm`, a scalar, to a norm of at most `max_norm` (0: any)."""
    gradients = [local(p.grad) for p in parameters.values() if p.grad is not None]
    if max_norm and gradients:
        torch._foreach_mul_(gradients, (max_norm / (norm + CLIP_EPS)).clamp(max=1.0))


@torch.no_grad()
def gradient_norm(
    parameters: Mapping[str, torch.Tensor],
    sharded_over: Mapping[str, tuple[Axis, ...]],
    *,
    copies: Collection[str] = (),
) -> torch.Tensor:
    """The norm of all gradients over all elements of all ranks, each counted once: a scalar.

    `sharded_over` are the axes over which pieces are spread, by name, the same on all ranks; another rank
    counts `copies`.
    """
    by_axes: dict[tuple[Axis, ...], list[torch.Tensor]] = {}
    for name, parameter in parameters.items():
        if name not in copies:
            axes = sharded_over.get(name, ())
            gradients = by_axes.setdefault(axes, [local(parameter.detach()).new_zeros(())])
            if parameter.grad is not None:
                gradients.append(local(parameter.grad))
    norms = []
    # Ranks of a pipeline have other parameters, but must reduce in the same order.
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
    """The norm over all elements of some tensors: a scalar.

    On a CPU PyTorch adds up a float32 tensor's squares one after the other: of three million elements the
    norm is off by 7e-5 (torch 2.13; `get_total_norm` and `clip_grad_norm_`, too). So it is taken in rows.
    """
    if tensors[0].device.type != "cpu":
        return torch.nn.utils.get_total_norm(tensors)
    norms = []
    for flat in (tensor.reshape(-1) for tensor in tensors):
        whole = flat.numel() // ROW * ROW
        rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1)
        norms += [torch.linalg.vector_norm(part) for part in (rows, flat[whole:])]
    return torch.linalg.vector_norm(torch.stack(norms))
