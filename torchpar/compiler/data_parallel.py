"""Data parallelism by placements: say where things live, and DTensor finds out what has to be summed.

Every rank holds all parameters and a share of the batch: parameters are `Replicate`, rows are `Shard(0)`. The
loss is a mean over the whole batch, written as for one device. DTensor goes through it operator by operator:
a product that contracts rows which are split is a `Partial` sum, and that is what a parameter's gradient
comes out as. Passes add up partial sums, which costs nothing; `synchronize_gradients` says that they are to
be whole, once a step, and there the all-reduce is.

Where PyTorch has no rule, a rank works on its own part: attention on a CPU (2.13), and our dropout.

Legend: B batch, T position, N = B T, C n_embd, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from compare.spec.axes import TP
from torchpar.compiler.placement import along, of_activation, on_own_part
from torchpar.dropout import Dropout
from torchpar.dtensors import Placements, axis_names, local_part
from torchpar.model import GPT, CausalAttention, Rotation

CrossEntropy = Callable[[DTensor, DTensor], torch.Tensor]


def split_batch(model: GPT, devices: DeviceMesh, *, cross_entropy: CrossEntropy = F.cross_entropy) -> None:
    """Say that a rank's rows are its part of the batch, where they come in and where the loss goes out.

    `cross_entropy` is from logits (N, V) and targets (N,) to their mean.
    """
    rows, whole = of_activation(devices), along(devices)
    forward = model.forward

    def of_own_rows(
        idx: torch.Tensor,
        targets: torch.Tensor | None = None,
        keys_B2: torch.Tensor | None = None,
    ) -> tuple[None, torch.Tensor | None]:
        """Without the logits: a DTensor that goes out of a compiled program needs a gradient that is one."""
        return None, forward(local_part(idx, devices, rows), targets, keys_B2)[1]

    def positions_come_in(_: nn.Module, arguments: tuple) -> DTensor:
        return local_part(arguments[0], devices, whole)

    def mean_loss(input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert isinstance(input, DTensor)
        mean = cross_entropy(input, local_part(target, devices, rows))
        assert isinstance(mean, DTensor)
        # This rank's share of an average; the gradient of the average itself is 1 on all of them.
        return mean.to_local(grad_placements=whole)

    model.forward = of_own_rows
    if "wpe" in model.transformer:
        model.transformer["wpe"].register_forward_pre_hook(positions_come_in)
    model.loss.forward = mean_loss
    for module in model.modules():
        if isinstance(module, Dropout | Rotation | CausalAttention):
            on_own_part(module)


def synchronize_gradients(gradient: torch.Tensor, placements: Placements) -> torch.Tensor:
    """A gradient as its parameter is placed: what is still a partial sum is reduced here, once a step.

    DTensor sums over several axes at once if there is a mesh of them alone. There is one of the axes of data:
    over tp it sums before.
    """
    assert isinstance(gradient, DTensor)
    both = zip(axis_names(gradient.device_mesh), gradient.placements, placements, strict=True)
    over_tp = tuple(then if name == TP else now for name, now, then in both)
    return gradient.redistribute(placements=over_tp).redistribute(placements=placements)
