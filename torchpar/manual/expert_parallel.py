"""Expert parallelism by hand: a rank has some of every layer's experts, and tokens are sent to them.

    counts       all-to-all     the number of rows for each expert; no row is dropped, so it depends on data
    dispatch     all-to-all     rows (S, C), sorted by expert, to the ranks of their experts
    compute                     this rank's experts, on the rows of all ranks
    combine      all-to-all     the outputs back, each row to its place

Backward runs combine and dispatch in reverse: each is the transpose of the other. The gradient of an expert
is then a sum over the rows of all ranks of ep. So it is reduced only over the ranks that have the same
expert, and divided by all ranks of the data.

S rows of this rank, k for each of its tokens; N rows that arrive; C embedding; R ranks; F experts of a rank.
Sources: GShard (arXiv 2006.16668); dropless, as in MegaBlocks (arXiv 2211.15841).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from compare.contract.communication import ACTIVATION_GRADIENTS, ACTIVATIONS, ROUTING
from compare.spec.axes import DP_SHARD, EP
from compare.spec.experiment import Layout
from torchpar.comm.collectives import Axis
from torchpar.comm.mesh import EXPERTS_DATA, Mesh
from torchpar.manual.split import Split, sharding_of
from torchpar.mlp import ExpertsFunction
from torchpar.model import GPT
from torchpar.sharding import Sharding

EXPERT_DIM = 0  # of weights (E, C, M) and (E, M, C)


class AllToAll(Function):
    """Rows (S, ...), by rank, to rows (N, ...), by rank. The gradients go the opposite way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], axis: Axis):
        ctx.back = received, sent, axis
        return _all_to_all(rows, sent, received, axis, ACTIVATIONS if rows.is_floating_point() else ROUTING)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor):
        return _all_to_all(gradients[0], *ctx.back, ACTIVATION_GRADIENTS), None, None, None


def _all_to_all(
    rows: torch.Tensor, sent: list[int], received: list[int], axis: Axis, purpose: str
) -> torch.Tensor:
    """Send `sent[r]` rows to each rank r, and receive `received[r]` rows from it."""
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    axis.all_to_all(arrived, rows.contiguous(), purpose=purpose, counts=(received, sent))
    return arrived


class ExchangeRows(nn.Module):
    """Sends rows to the ranks of their experts, and the outputs back."""

    def __init__(self, all_to_all: Callable[..., torch.Tensor], ranks: int):
        """Exchange rows by `all_to_all(rows, sent, received)` between `ranks` ranks."""
        super().__init__()
        self.all_to_all, self.ranks = all_to_all, ranks

    def forward(
        self, compute: ExpertsFunction, rows_SC: torch.Tensor, counts_E: torch.Tensor
    ) -> torch.Tensor:
        """Outputs (S, C) of rows (S, C) that are sorted by expert, counts_E[e] of them for expert e."""
        # Counts: send each rank the number of rows for each of its experts, one row (F,) of counts.
        sent_RF, one_each = counts_E.view(self.ranks, -1), [1] * self.ranks
        received_RF = self.all_to_all(sent_RF, one_each, one_each)
        # Only here the host waits for the device: it needs the sizes of the messages.
        counts_sent, counts_received = torch.stack([sent_RF, received_RF]).tolist()
        sent, received = ([sum(of_rank) for of_rank in counts] for counts in (counts_sent, counts_received))
        # Dispatch: every row to the rank of its expert.
        rows_NC = self.all_to_all(rows_SC, sent, received)
        # The rows are sorted by rank and then by expert: compute needs them by expert.
        expert_F = torch.arange(received_RF.shape[1], device=received_RF.device)
        expert_N = expert_F.repeat(self.ranks).repeat_interleave(
            received_RF.flatten(), output_size=len(rows_NC)
        )
        by_expert_N = expert_N.argsort(stable=True)
        counts_F = [sum(of_expert) for of_expert in zip(*counts_received, strict=True)]
        y_NC = compute(rows_NC[by_expert_N], received_RF.sum(0), counts_F)
        # Combine: every output, in the order of arrival, back to the rank of its row.
        return self.all_to_all(y_NC[by_expert_N.argsort()], received, sent)


def shard_experts(model: GPT, mesh: Mesh, layout: Layout) -> tuple[Sharding, dict[nn.Parameter, Axis]]:
    """Keep this rank's experts of every block, and exchange rows with other ranks. Names of parameters stay.

    Also returns, by parameter, the axis of the ranks that have the same expert.
    """
    axis, splits, axis_of = mesh[EP], dict[str, Split](), dict[nn.Parameter, Axis]()

    def all_to_all(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        return AllToAll.apply(rows, sent, received, axis)

    for number, block in enumerate(model.blocks):
        for path in ("mlp.c_fc", "mlp.c_proj"):
            module = block.get_submodule(path)
            full = module.get_parameter("weight")
            split = splits[f"transformer.h.{number}.{path}.weight"] = Split(dim=EXPERT_DIM, size=len(full))
            module.register_parameter("weight", weight := split.parameter(full, axis))
            axis_of[weight] = mesh[DP_SHARD] if layout.zero else mesh.joined(*EXPERTS_DATA)
        block.set_submodule("mlp.core.exchange", ExchangeRows(all_to_all, axis.size))
    return sharding_of(splits, axis), axis_of
