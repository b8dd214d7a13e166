"""Tensor parallelism by placements: a table says which dims are split, and DTensor does Megatron's split.

The parameters' placements follow from the table of axes. The code says beyond it where activations live at
both ends of a region of split work. Left to itself DTensor carries a partial sum on, to the next operator
that is not linear: into the LayerNorm, and through every residual stream before it.

Two more things have to be said than to XLA. The fused q, k, v are rows of one weight, and a placement cuts
rows into contiguous parts: they are dealt out by head once (`torchpar.dtensors`), and inside of the region
each rank sees its own heads. And DTensor has no rule for a loss over a split vocabulary: `cross_entropy` is
written so that only three numbers a position are reduced. One thing less: parts may be uneven, so that no
logit is padding.

Legend: B batch, T position, N = B T, C n_embd, V vocabulary.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from compare.spec.axes import TP
from torchpar.compiler.placement import along, of_activation
from torchpar.dropout import split_rows
from torchpar.dtensors import Placements, local_part
from torchpar.model import GPT

AXIS = TP
POSITION_DIM, FEATURE_DIM = 1, 2  # of (B, T, C)


def split_layers(model: GPT, devices: DeviceMesh, *, sequence_parallel: bool = False) -> None:
    """Say where activations live at both ends of every region of split work.

    The rows of a fused q, k, v are dealt out by head. Between the regions sequence parallelism splits
    positions.
    """
    whole, split = of_activation(devices), of_activation(devices, split=FEATURE_DIM)
    stream = of_activation(devices, split=POSITION_DIM) if sequence_parallel else whole

    def enters(module: nn.Module, *, to: Placements) -> None:
        module.register_forward_pre_hook(lambda _, inputs: (_at(inputs[0], devices, to), *inputs[1:]))

    def leaves(module: nn.Module, *, to: Placements) -> None:
        module.register_forward_hook(lambda _, inputs, y: _at(y, devices, to))

    leaves(model.transformer["wte"], to=stream)
    for block in model.blocks:
        for region in ("attn",) if model.balance else ("attn", "mlp"):
            enters(block.get_submodule(region), to=whole)
            leaves(block.get_submodule(f"{region}.c_proj"), to=stream)
        # Of its own heads a rank has q, k and v: no view of a whole tensor says so.
        fused = block.get_submodule("attn.c_attn")
        fused.register_forward_hook(lambda _, inputs, y: _at(y, devices, split).to_local())
        enters(block.get_submodule("attn.c_proj"), to=split)
    enters(model.lm_head, to=whole)
    split_rows(model, devices.get_local_rank(AXIS), sequence_parallel=sequence_parallel)


def cross_entropy(logits_NV: DTensor, targets_N: DTensor) -> torch.Tensor:
    """The mean cross-entropy in nats, a scalar, of logits that are split by vocabulary.

    Of each position the greatest logit, the sum of exponentials and the target's logit are reduced.
    """
    devices, (_, V) = logits_NV.device_mesh, logits_NV.shape
    whole = of_activation(devices)

    def reduced(x_N: torch.Tensor) -> DTensor:
        assert isinstance(x_N, DTensor)
        return x_N.redistribute(placements=whole)

    greatest_N1 = reduced(logits_NV.detach().amax(dim=-1, keepdim=True))
    shifted_NV = logits_NV - greatest_N1
    all_V = local_part(torch.arange(V, device=targets_N.device), devices, along(devices))
    number_V = all_V.redistribute(placements=along(devices, tp=0))
    of_target_NV = torch.where(number_V == targets_N[:, None], shifted_NV, 0.0)
    return (reduced(shifted_NV.exp().sum(-1)).log() - reduced(of_target_NV.sum(-1))).mean()


def _at(x: torch.Tensor, devices: DeviceMesh, placements: Placements) -> DTensor:
    """Say where x lives: a DTensor goes there, and so does its gradient; a plain tensor is there already."""
    if isinstance(x, DTensor):
        return x.redistribute(placements=placements)
    return local_part(x, devices, placements)
