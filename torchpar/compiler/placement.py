"""Where parameters and activations live, as DTensor's placements on a mesh of the layout's axes.

    axis           parameters                                  activations (B, ...)
    tp             the dim whose logical axis is split         replicated, split in regions of split work
    dp_replicate   replicated                                  B
    cp             replicated                                  B: a part of a sequence is a row
    dp_shard       dim 0, by the stage of ZeRO                 B
    ep             experts; dim 0 of others, as dp_shard       B

tp is outermost in the mesh. If tp and dp_shard split one dim, dp_shard splits each shard of tp, so a gather
along dp_shard gives the shard of tp. Axes of one rank are left out: DTensor would plan for each of them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from compare.numerics.parameters import parameter_table
from compare.spec.axes import CP, DATA, DP_REPLICATE, DP_SHARD, EP, SPLIT, TP
from torchpar.dtensors import Placements, axis_names, from_local
from torchpar.model import GPT
from torchpar.weights import nanogpt_dim, nanogpt_name

ORDER = (TP, DP_REPLICATE, CP, DP_SHARD, EP)
"""Mesh axes, outermost first."""


def shard_axis(devices: DeviceMesh) -> str:
    """The axis over which ZeRO shards all parameters but experts: dp_shard, or ep if both are equal."""
    return EP if EP in axis_names(devices) else DP_SHARD


def placements(devices: DeviceMesh, **dims: int | None) -> Placements:
    """Split along the axes that are given a dim, replicated along all other axes."""
    given = (dims.get(name) for name in axis_names(devices))
    return tuple(Replicate() if dim is None else Shard(dim) for dim in given)


def placements_of_activation(devices: DeviceMesh, *, split: int | None = None) -> Placements:
    """Placements of an activation (B, ...): rows along DATA, and along tp the dim `split`."""
    return placements(devices, **{**dict.fromkeys(DATA, 0), TP: split})


def placements_of_parameters(model: GPT, devices: DeviceMesh, *, sharded: bool) -> dict[str, Placements]:
    """Placements of a model's parameters, from their logical axes; `sharded` also over dp_shard."""
    found = {}
    for row in parameter_table(model.config):
        dims = {SPLIT[axis]: nanogpt_dim(row, dim) for dim, axis in enumerate(row.axes) if axis in SPLIT}
        if sharded:
            dims.setdefault(shard_axis(devices), 0)
        found[nanogpt_name(row.name)] = placements(devices, **dims)
    return found


def place_parameters(model: nn.Module, devices: DeviceMesh, at: Mapping[str, Placements]) -> None:
    """Replace a model's parameters by DTensors. Nothing moves, and tied parameters stay tied."""
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in placed:
                where = at[f"{path}.{name}"]
                shard = distribute_tensor(parameter.detach(), devices, where, src_data_rank=None)
                placed[parameter] = nn.Parameter(shard)
            setattr(module, name, placed[parameter])


def run_on_local_shard(module: nn.Module) -> None:
    """Let a module compute on each rank's local shard, for an operation by row, by head or by position."""
    forward: Callable[..., torch.Tensor] = module.forward

    def run(x: torch.Tensor, *others: Any) -> torch.Tensor:
        if not isinstance(x, DTensor):
            return forward(x, *others)
        local = (t.to_local() if isinstance(t, DTensor) else t for t in (x, *others))
        return from_local(forward(*local), x.device_mesh, x.placements)

    module.forward = run
