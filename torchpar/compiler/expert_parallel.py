"""Experts by placements. DTensor has no rule for rows that are sorted by expert: they stay local tensors.

With experts on every rank, a rank computes its own rows. Placements only describe the local tensors:
under tp, where inner features are split, the output is a partial sum.

With ep this is not expert parallelism as torch-manual and torch-library have it. Placements describe fixed
shapes, but the number of rows of an expert is data. So each rank writes its rows into (E, N, C), with room
for all its tokens at every expert. That is `Shard(1)`, experts are `Shard(0)`, and the change of placement
would be an all-to-all. On a CPU DTensor gathers instead: every rank receives all rows, and keeps the rows of
its experts. The numbers are the same, and the bytes are many times more. The layouts of ep stay to show this.

B batch, T position, C embedding, E experts, N tokens, S rows: k for each token.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from compare.spec.axes import EP, TP
from torchpar.compiler.placement import placements_of_activation
from torchpar.dtensors import axis_names, from_local, local_weight
from torchpar.mlp import ExpertsFunction
from torchpar.model import GPT
from torchpar.sharding import divide_gradient


class PaddedExchange(nn.Module):
    """Sends rows to the ranks of their experts, and the outputs back, by two changes of placement."""

    def __init__(self, devices: DeviceMesh, per_token: int):
        super().__init__()
        self.devices, self.per_token = devices, per_token

    def forward(
        self, compute: ExpertsFunction, rows_SC: torch.Tensor, counts_E: torch.Tensor
    ) -> torch.Tensor:
        """Outputs (S, C) of rows (S, C) that are sorted by expert, counts_E[e] of them for expert e."""
        experts, room = len(counts_E), len(rows_SC) // self.per_token
        row_S = torch.arange(len(rows_SC), device=rows_SC.device)
        expert_S = torch.arange(experts, device=rows_SC.device).repeat_interleave(
            counts_E, output_size=len(rows_SC)
        )
        first_row_E = counts_E.cumsum(0) - counts_E
        place_S = row_S - first_row_E[expert_S]  # place of a row among the rows of its expert
        out_ENC = rows_SC.new_zeros(experts, room, rows_SC.shape[1])
        out_ENC = out_ENC.index_put((expert_S, place_S), rows_SC)
        # Dispatch: all experts of this rank's tokens become some experts of all tokens.
        # Backward is the inverse.
        in_ENC = self.redistribute(out_ENC, Shard(1), Shard(0))
        here, rows_of_each = in_ENC.shape[:2]
        counts_F = counts_E.new_full((here,), rows_of_each)
        y_ENC = compute(in_ENC.flatten(0, 1), counts_F, [rows_of_each] * here).unflatten(0, (here, -1))
        # Combine: the inverse, and its backward is as dispatch. On a CPU each of the four is a gather.
        return self.redistribute(y_ENC, Shard(0), Shard(1))[expert_S, place_S]

    def redistribute(self, x_ENC: torch.Tensor, before: Shard, after: Shard) -> torch.Tensor:
        x = from_local(x_ENC.contiguous(), self.devices, (before,))
        return x.redistribute(placements=[after]).to_local()


def split_experts(model: GPT, devices: DeviceMesh, *, split: int | None) -> None:
    """Compute experts on local shards. The stream (B, T, C) is split by tp along the dim `split`, if any."""
    replicated, stream = placements_of_activation(devices), placements_of_activation(devices, split=split)
    named = zip(axis_names(devices), replicated, strict=True)
    partial_sum = tuple(Partial() if name == TP else placement for name, placement in named)

    def enter(_: nn.Module, inputs: tuple) -> tuple:
        x_BTC = inputs[0]
        assert isinstance(x_BTC, DTensor)
        # f. Forward: nothing, or an all-gather of split T. Backward: the partial sums over tp are added.
        return x_BTC.redistribute(placements=replicated).to_local(grad_placements=partial_sum), *inputs[1:]

    def leave(_: nn.Module, inputs: tuple, y_BTC: torch.Tensor) -> DTensor:
        # g. The partial sum over tp becomes the stream: an all-reduce, or a reduce-scatter of split T.
        return from_local(y_BTC, devices, partial_sum).redistribute(placements=stream)

    for block in model.blocks:
        if EP in axis_names(devices):
            exchange = PaddedExchange(devices[EP], model.config.experts_per_token)
            block.set_submodule("mlp.core.exchange", exchange)
        block.get_submodule("mlp").register_forward_pre_hook(enter)
        block.get_submodule("mlp.core").register_forward_hook(leave)
        for name in ("router", "c_fc", "c_proj"):
            weight = block.get_submodule(f"mlp.{name}")
            weight.register_forward_hook(lambda _, inputs, weight: local_weight(weight))
    # Each rank computes the balance loss of all choices: it begins backward with its share of the gradient.
    model.get_submodule("balance").register_forward_hook(
        lambda _, inputs, loss: divide_gradient(loss, devices.size())
    )
