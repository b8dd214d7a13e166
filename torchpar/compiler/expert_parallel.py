"""Experts by placements: what is sorted by expert, and how many rows each has, are data. DTensor has no rule.

So a rank works on its own part of the batch, and of the weights, from where the stream comes in to where it
leaves; placements say what that is part of: under tp, where inner features are split, of a sum.

Under ep a placement is all that there is to say: each rank sets out its rows by expert, in room for all of
its tokens, (E, N, C), of which it has some of the N of all ranks: `Shard(1)`. Experts are at `Shard(0)`. On a
CPU DTensor (2.13) makes no all-to-all of that: it gathers, and each rank throws away all but its own.

Legend: B batch, T position, C embedding, E experts, N tokens, S rows: k for each token.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from compare.spec.axes import EP, TP
from torchpar.compiler.placement import of_activation
from torchpar.dtensors import axis_names, local_part, own_part
from torchpar.mlp import Rows
from torchpar.model import GPT
from torchpar.sharding import divide_gradient


class PlacedByExpert(nn.Module):
    """Rows go where the experts are by a change of placement, and so do their outputs come back."""

    def __init__(self, devices: DeviceMesh, per_token: int):
        super().__init__()
        self.devices, self.per_token = devices, per_token

    def forward(self, compute: Rows, rows_SC: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """`compute` this rank's rows (S, C), counts_E[e] of them for expert e of all: (S, C)."""
        room = len(rows_SC) // self.per_token
        expert_S = torch.arange(len(counts_E), device=rows_SC.device).repeat_interleave(counts_E)
        place_S = (
            torch.arange(len(rows_SC), device=rows_SC.device) - (counts_E.cumsum(0) - counts_E)[expert_S]
        )
        out_ENC = rows_SC.new_zeros(len(counts_E), room, rows_SC.shape[1])
        out_ENC = out_ENC.index_put((expert_S, place_S), rows_SC)
        in_ENC = self.moved(out_ENC, Shard(1), Shard(0))
        all_of_each = counts_E.new_full((len(in_ENC),), in_ENC.shape[1])
        back_ENC = compute(in_ENC.flatten(0, 1), all_of_each).unflatten(0, in_ENC.shape[:2])
        return self.moved(back_ENC, Shard(0), Shard(1))[expert_S, place_S]

    def moved(self, part: torch.Tensor, now: Shard, then: Shard) -> torch.Tensor:
        return local_part(part.contiguous(), self.devices, (now,)).redistribute(placements=[then]).to_local()


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
        if EP in axis_names(devices):
            exchange = PlacedByExpert(devices[EP], model.config.experts_per_token)
            block.set_submodule("mlp.core.exchange", exchange)
        block.get_submodule("mlp").register_forward_pre_hook(enter)
        block.get_submodule("mlp.core").register_forward_hook(leave)
        for name in ("router", "c_fc", "c_proj"):
            weight = block.get_submodule(f"mlp.{name}")
            weight.register_forward_hook(lambda _, inputs, weight: own_part(weight))
    # The loss is this rank's share of an average, which the gradient is of.
    model.get_submodule("balance").register_forward_hook(
        lambda _, inputs, loss: divide_gradient(loss, devices.size())
    )
