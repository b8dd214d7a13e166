"""Expert parallelism by hand: a rank has some of every layer's experts, and tokens travel to theirs.

    counts      all-to-all     how many rows each rank has for each expert: that is data, for none is dropped
    dispatch    all-to-all     rows (S, C), sorted by expert, go to the ranks of their experts
    compute     -              the experts that are here, on what came from all ranks
    combine     all-to-all     what they made goes back, each row to its place

Backward is combine and dispatch in reverse, each the transpose of the other. The gradient of an expert is
then a sum over the rows of all ranks of ep: it is reduced over the ranks that have the same expert, and of
those ZeRO shares it out among dp_shard's alone. The mean divides it by all ranks of data, as any other.

S rows of this rank, k for each of its tokens; N rows that came; C embedding.
Sources: GShard (arXiv 2006.16668); dropless, as in MegaBlocks (arXiv 2211.15841).
"""

from typing import Any

import torch

from compare.contract.communication import ACTIVATION_GRADIENTS, ACTIVATIONS, ROUTING
from compare.spec.axes import DP_SHARD, EP
from compare.spec.experiment import Layout
from torchpar.comm.collectives import Axis
from torchpar.comm.mesh import EXPERTS_DATA, Mesh
from torchpar.experts import ExchangeRows
from torchpar.manual.flat import MARK
from torchpar.manual.megatron import Split
from torchpar.model import GPT
from torchpar.sharding import Sharding, TensorsByName

EXPERT_DIM = 0  # of weights (E, C, M) and (E, M, C)


def share_out_experts(model: GPT, mesh: Mesh, layout: Layout) -> Sharding:
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
        all_to_all = lambda *rows_sent_came: AllToAll.apply(*rows_sent_came, axis)  # noqa: E731
        block.set_submodule("mlp.core.exchange", ExchangeRows(all_to_all, axis.size))

    def gather(pieces: TensorsByName) -> TensorsByName:
        return {n: splits[n].gather(piece, axis) if n in splits else piece for n, piece in pieces.items()}

    return Sharding(axes=dict.fromkeys(splits, (axis,)), gather=gather)


class AllToAll(torch.autograd.Function):
    """So many rows to each rank of an axis, and from each: (S, ..) to (N, ..); it is its own transpose."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], came: list[int], axis: Axis):
        ctx.back = came, sent, axis
        purpose = ACTIVATIONS if rows.is_floating_point() else ROUTING
        return _exchange(rows, sent, came, axis, purpose)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor):
        return _exchange(gradients[0], *ctx.back, ACTIVATION_GRADIENTS), None, None, None


def _exchange(rows: torch.Tensor, sent: list[int], came: list[int], axis: Axis, purpose: str) -> torch.Tensor:
    received = rows.new_empty(sum(came), *rows.shape[1:])
    axis.all_to_all(received, rows.contiguous(), purpose=purpose, counts=(came, sent))
    return received
