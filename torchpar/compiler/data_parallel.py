"""Data parallelism by placements: parameters are `Replicate`, rows `Shard(0)`, and DTensor finds the sums.

The loss is a mean over the whole batch, written as for one device. DTensor propagates placements through
every operator. A product that contracts rows, which are split, gives a `Partial` sum. So each parameter's
gradient is `Partial`. Passes add partial sums, and nothing moves. Once a step `synchronize_gradients`
redistributes them to the parameter's placements: that is the all-reduce.

PyTorch has no rule for attention on a CPU and none for our dropout: these compute on local shards.

B batch, T position, N = B T, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from compare.spec.axes import TP
from torchpar.compiler.placement import placements, placements_of_activation, run_on_local_shard
from torchpar.dropout import Dropout
from torchpar.dtensors import Placements, axis_names, from_local
from torchpar.model import GPT, CausalAttention, Rotation

CrossEntropy = Callable[[DTensor, DTensor], torch.Tensor]


def split_batch(model: GPT, devices: DeviceMesh, *, cross_entropy: CrossEntropy = F.cross_entropy) -> None:
    """Declare that a rank's rows are its shard of the batch, where they enter and where the loss leaves.

    `cross_entropy` is from logits (N, V) and targets (N,) to their mean.
    """
    rows, replicated = placements_of_activation(devices), placements(devices)
    forward = model.forward

    def forward_of_rows(
        idx: torch.Tensor,
        targets: torch.Tensor | None = None,
        keys_B2: torch.Tensor | None = None,
    ) -> tuple[None, torch.Tensor | None]:
        """No logits: AOTAutograd expects a DTensor gradient for each DTensor output."""
        return None, forward(from_local(idx, devices, rows), targets, keys_B2)[1]

    def replicate_positions(_: nn.Module, arguments: tuple) -> DTensor:
        return from_local(arguments[0], devices, replicated)

    def mean_loss(input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert isinstance(input, DTensor)
        mean = cross_entropy(input, from_local(target, devices, rows))
        assert isinstance(mean, DTensor)
        # `mean` is the mean over the rows of all ranks, and its gradient is 1 on every rank: Replicate. The
        # local value is the mean over this rank's rows. The loop averages these values, for the record.
        return mean.to_local(grad_placements=replicated)

    model.forward = forward_of_rows
    if "wpe" in model.transformer:
        model.transformer["wpe"].register_forward_pre_hook(replicate_positions)
    model.loss.forward = mean_loss
    for module in model.modules():
        if isinstance(module, Dropout | Rotation | CausalAttention):
            run_on_local_shard(module)


def synchronize_gradients(gradient: torch.Tensor, placements: Placements) -> torch.Tensor:
    """Redistribute a gradient to its parameter's placements, which reduces partial sums. Once a step.

    It sums over tp first. Then DTensor sums over all axes of data at once, for which there is a flattened
    mesh.
    """
    assert isinstance(gradient, DTensor)
    both = zip(axis_names(gradient.device_mesh), gradient.placements, placements, strict=True)
    over_tp = tuple(after if name == TP else before for name, before, after in both)
    return gradient.redistribute(placements=over_tp).redistribute(placements=placements)
