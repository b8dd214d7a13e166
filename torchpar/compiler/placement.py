"""Where parameters and activations live, as DTensor's placements on a mesh of the layout's axes.

    axis           parameters                                      activations (B, ...)
    tp             the dim whose logical axis its table names      whole, but in a region of split work
    dp_replicate   whole                                           B
    cp             whole                                           B: a part of a sequence is a row
    dp_shard       dim 0, as far as ZeRO says                      B
    ep             experts; dim 0 of others, as dp_shard           B

The mesh has tp outermost: where tp and dp_shard split one dim, dp_shard splits within tp's part, and what is
gathered along it is that part. Axes of one rank are left out: DTensor would plan for each of them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from compare.numerics.parameters import parameter_table
from compare.spec.axes import CP, DATA, DP_REPLICATE, DP_SHARD, EP, SPLIT, TP
from torchpar.dtensors import Placements, axis_names, local_part
from torchpar.model import GPT
from torchpar.weights import nanogpt_dim, nanogpt_name

ORDER = (TP, DP_REPLICATE, CP, DP_SHARD, EP)
"""Mesh axes, outermost first."""


def shard_axis(devices: DeviceMesh) -> str:
    """The axis over which ZeRO splits what is no expert: dp_shard, or ep where that is all of it."""
    return EP if EP in axis_names(devices) else DP_SHARD


def along(devices: DeviceMesh, **dims: int | None) -> Placements:
    """Split along the axes that are given a dim, whole along the others."""
    given = (dims.get(name) for name in axis_names(devices))
    return tuple(Replicate() if dim is None else Shard(dim) for dim in given)


def of_activation(devices: DeviceMesh, *, split: int | None = None) -> Placements:
    """Those of (B, ...): rows by DATA, and a dim that tp splits, if any."""
    return along(devices, **{**dict.fromkeys(DATA, 0), TP: split})


def of_parameters(model: GPT, devices: DeviceMesh, *, sharded: bool) -> dict[str, Placements]:
    """Those of a model's parameters, from their canonical logical axes; `sharded`: over dp_shard, too."""
    placements = {}
    for row in parameter_table(model.config):
        dims = {SPLIT[axis]: nanogpt_dim(row, dim) for dim, axis in enumerate(row.axes) if axis in SPLIT}
        if sharded:
            dims.setdefault(shard_axis(devices), 0)
        placements[nanogpt_name(row.name)] = along(devices, **dims)
    return placements


def place_parameters(model: nn.Module, devices: DeviceMesh, placements: Mapping[str, Placements]) -> None:
    """Put DTensors in the place of a model's parameters: nothing is sent; tied ones stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                at = placements[f"{path}.{name}"]
                part = distribute_tensor(parameter.detach(), devices, at, src_data_rank=None)
                made[parameter] = nn.Parameter(part)
            setattr(module, name, made[parameter])


def on_own_part(module: nn.Module) -> None:
    """Let a module see each rank's part alone: what it does to a row, a head or a position needs no other."""
    forward: Callable[..., torch.Tensor] = module.forward

    def run(x: torch.Tensor, *others: Any) -> torch.Tensor:
        if not isinstance(x, DTensor):
            return forward(x, *others)
        own = (t.to_local() if isinstance(t, DTensor) else t for t in (x, *others))
        return local_part(forward(*own), x.device_mesh, x.placements)

    module.forward = run
