"""AdamW and SGD as `compare.contract.optimizer` defines them, by torch.optim."""

import torch

from compare.contract.experiment import Optimizer
from compare.contract.learning_rate import learning_rate
from compare.contract.parameters import decays
from torchpar.model import GPT
from torchpar.weights import canonical_parameters


def make_optimizer(model: GPT, config: Optimizer) -> torch.optim.Optimizer:
    """The experiment's optimizer over the model's parameters, in two groups: what decays, and the rest.

    What decays comes from the canonical table and not from a tensor's dimensions, which a sharded layout
    changes. Fused kernels: foreach would make a temporary as large as the model.
    """
    groups: dict[float, list[torch.nn.Parameter]] = {}
    for row, parameter in canonical_parameters(model):
        weight_decay = config.weight_decay if decays(row, config.decay) else 0.0
        groups.setdefault(weight_decay, []).append(parameter)
    params = [{"params": group, "weight_decay": weight_decay} for weight_decay, group in groups.items()]
    lr = learning_rate(config, 0)
    if config.name == "adamw":
        return torch.optim.AdamW(
            params, lr=lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
        )
    return torch.optim.SGD(params, lr=lr, momentum=config.momentum, fused=True)


def optimizer_step(optimizer: torch.optim.Optimizer, config: Optimizer, step: int) -> torch.Tensor:
    """Clip by the global norm, update the weights, and drop the gradients.

    Args:
        optimizer: from `make_optimizer`; every parameter has its synchronised gradient.
        config: the experiment's optimizer section.
        step: optimizer steps already taken.

    Returns:
        The global gradient norm before clipping, a scalar tensor.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if config.grad_clip:
        torch.nn.utils.clip_grads_with_norm_(parameters, config.grad_clip, norm)  # adds CLIP_EPS itself
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
