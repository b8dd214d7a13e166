"""Mistakes that a user of PyTorch's own tensor parallelism can make, for `torchpar.faults` to plant."""

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import RowwiseParallel


def unsummed(**layouts: Any) -> RowwiseParallel:
    """Linear layers whose output stays a partial sum; the embedding, which names its input, stays right."""
    return RowwiseParallel(**(layouts if "input_layouts" in layouts else {"output_layouts": Partial()}))


def take_parts_for_sums(model: nn.Module) -> None:
    """Declare gradients that are still to be summed complete as they are."""
    for parameter in model.parameters():
        gradient = parameter.grad
        assert isinstance(parameter, DTensor)
        if isinstance(gradient, DTensor) and any(how.is_partial() for how in gradient.placements):
            part, mesh = gradient.to_local(), gradient.device_mesh
            parameter.grad = DTensor.from_local(part, mesh, parameter.placements, run_check=False)
