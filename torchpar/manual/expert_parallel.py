"""Expert parallelism by hand: a rank has some of every layer's experts, and tokens travel to theirs.

    counts      all-to-all     how many rows each rank has for each expert: that is data, for none is dropped
    dispatch    all-to-all     rows (S, C), sorted by expert, go to the ranks of their experts
    compute     -              the experts that are here, on what came from all ranks
    combine     all-to-all     what they made goes back, each row to its place

Backward is combine and dispatch in reverse, each the transpose of the other. The gradient of an expert is
then a sum over the rows of all ranks of ep: it is reduced over the ranks that have the same expert, and of
those ZeRO shares it out among dp_shard's alone. The mean divides it by all ranks of data, as any other.

S rows of this rank, k for each of its tokens; N rows that came; C embedding; R ranks of ep, F experts of one.
Sources: GShard (arXiv 2006.16668); dropless, as in MegaBlocks (arXiv 2211.15841).
"""

from typing import Any

import torch
from torch import nn

from compare.contract.communication import ACTIVATION_GRADIENTS, ACTIVATIONS, ROUTING
from compare.spec.axes import DP_SHARD, EP
from compare.spec.experiment import Layout
from torchpar.comm.collectives import Axis
from torchpar.comm.mesh import EXPERTS_DATA, Mesh
from torchpar.manual.flat import MARK
from torchpar.manual.megatron import Split
from torchpar.model import GPT, Rows
from torchpar.parallel_model import Strategy, TensorsByName

EXPERT_DIM = 0  # of weights (E, C, M) and (E, M, C)


def share_out_experts(model: GPT, mesh: Mesh, layout: Layout) -> Strategy:
    """Keep this rank's experts of every block, and send tokens to the others'; names of parameters stay."""
    axis, splits = mesh[EP], dict[str, Split]()
    reduced_over = mesh[DP_SHARD] if layout.zero else mesh.joined(*EXPERTS_DATA)
    for number, block in enumerate(model.blocks):
        for path in ("mlp.c_fc", "mlp.c_proj"):
            module = block.get_submodule(path)
            whole = module.get_parameter("weight")
            split = Split(dim=EXPERT_DIM, size=len(whole))
            module.weight = split.parameter(whole, axis)
            module.weight.__dict__[MARK] = reduced_over
            splits[f"transformer.h.{number}.{path}.weight"] = split
        block.set_submodule("mlp.core.exchange", ExchangeRows(axis))

    def gather(pieces: TensorsByName) -> TensorsByName:
        return {n: splits[n].gather(piece, axis) if n in splits else piece for n, piece in pieces.items()}

    return Strategy(axis=axis, spread=splits, gather=gather)


class ExchangeRows(nn.Module):
    """Rows of tokens go to the ranks of their experts, and what these make of them comes back."""

    def __init__(self, axis: Axis):
        super().__init__()
        self.axis = axis

    def forward(self, compute: Rows, rows_SC: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """`compute` this rank's rows (S, C), counts_E[e] of them for expert e of all: (S, C)."""
        sent_RF = counts_E.view(self.axis.size, -1)
        came_RF = torch.empty_like(sent_RF)
        self.axis.all_to_all(came_RF, sent_RF, purpose=ROUTING)
        sent, came = sent_RF.sum(1).tolist(), came_RF.sum(1).tolist()
        rows_NC = AllToAll.apply(rows_SC, self.axis, sent, came)
        # They came by rank, and of each by expert.
        expert_F = torch.arange(came_RF.shape[1], device=came_RF.device)
        by_expert_N = expert_F.repeat(len(came_RF)).repeat_interleave(came_RF.flatten()).argsort(stable=True)
        y_NC = compute(rows_NC[by_expert_N], came_RF.sum(0))
        return AllToAll.apply(y_NC[by_expert_N.argsort()], self.axis, came, sent)


class AllToAll(torch.autograd.Function):
    """So many rows to each rank of an axis, so many from each: (S, C) to (N, C); its transpose is itself."""

    @staticmethod
    def forward(ctx: Any, rows_SC: torch.Tensor, axis: Axis, sent: list[int], came: list[int]):
        ctx.back = axis, came, sent
        return _exchange(rows_SC, axis, sent, came, ACTIVATIONS)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor):
        return _exchange(gradients[0], *ctx.back, ACTIVATION_GRADIENTS), None, None, None


def _exchange(
    rows_SC: torch.Tensor, axis: Axis, sent: list[int], came: list[int], purpose: str
) -> torch.Tensor:
    rows_NC = rows_SC.new_empty(sum(came), rows_SC.shape[1])
    axis.all_to_all(rows_NC, rows_SC.contiguous(), purpose=purpose, counts=(came, sent))
    return rows_NC
