"""Experts by placements: what is sorted by expert, and how many rows each has, are data. DTensor has no rule.

So a rank works on its own part of the batch, and of the weights, from where the stream comes in to where it
leaves; placements say what that is part of: under tp, where inner features are split, of a sum.

Legend: B batch, T position, C embedding.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from compare.spec.axes import TP
from torchpar.compiler.placement import of_activation
from torchpar.dtensors import axis_names, local_part, own_part
from torchpar.model import GPT, divide_gradient


def split_experts(model: GPT, devices: DeviceMesh, *, split: int | None) -> None:
    """Let each rank compute its own tokens; the stream (B, T, C) is split along a dim by tp, if any."""
    whole, stream = of_activation(devices), of_activation(devices, split=split)
    named = zip(axis_names(devices), whole, strict=True)
    part = tuple(Partial() if name == TP else placement for name, placement in named)

    def enter(_: nn.Module, inputs: tuple) -> tuple:
        x_BTC = inputs[0]
        assert isinstance(x_BTC, DTensor)
        return x_BTC.redistribute(placements=whole).to_local(grad_placements=part), *inputs[1:]

    def leave(_: nn.Module, inputs: tuple, y_BTC: torch.Tensor) -> DTensor:
        return local_part(y_BTC, devices, part).redistribute(placements=stream)

    for block in model.blocks:
        block.get_submodule("mlp").register_forward_pre_hook(enter)
        block.get_submodule("mlp.core").register_forward_hook(leave)
        for name in ("router", "c_fc", "c_proj"):
            weight = block.get_submodule(f"mlp.{name}")
            weight.register_forward_hook(lambda _, inputs, weight: own_part(weight))
    # The loss is this rank's share of an average, which the gradient is of.
    model.get_submodule("balance").register_forward_hook(
        lambda _, inputs, loss: divide_gradient(loss, devices.size())
    )
