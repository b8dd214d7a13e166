"""DTensors: PyTorch's DeviceMesh over the process groups of our mesh, and tensors whole again.

The fused q, k, v is one (3 C, C) weight, and a cut of its rows would part q from v. They are reordered once,
so that each rank's contiguous part has the q, k and v of its own heads. Whole tensors are put back in order.
Groups of queries (GQA) have their k and v behind them: their rows are in this order.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from compare.spec.axes import AXES, DP_SHARD, EP, SHARDS, TP, parts_of
from torchpar.comm.collectives import Axis, chunk_slices
from torchpar.comm.mesh import Mesh
from torchpar.engine import Engine
from torchpar.model import GPT, CausalSelfAttention
from torchpar.sharding import Parameters, Sharding, TensorsByName

Placements = tuple[Placement, ...]


def make_device_mesh(mesh: Mesh, names: Sequence[str]) -> DeviceMesh:
    """A mesh of some axes, or of several as one, to be cut by name: `devices[TP]`; others have one rank."""
    axes = [mesh[name] for name in names]
    # An axis of one rank has no group, but a DeviceMesh wants one.
    alone = dist.new_group([mesh.world.rank], use_local_synchronization=True)
    assert isinstance(alone, dist.ProcessGroup)
    ranks = np.arange(mesh.world.size).reshape([mesh[name].size for name in AXES])
    named = [part for name in names for part in parts_of(name)]
    order = [AXES.index(name) for name in (*named, *(name for name in AXES if name not in named))]
    return DeviceMesh.from_group(
        [axis.group or alone for axis in axes],
        mesh.device.type,
        mesh=ranks.transpose(order).reshape([axis.size for axis in axes]),
        mesh_dim_names=tuple(names),
    )


def axis_names(devices: DeviceMesh) -> tuple[str, ...]:
    """Names of a mesh's axes, outermost first."""
    names = devices.mesh_dim_names
    assert names is not None
    return names


def local_part(
    part: torch.Tensor, devices: DeviceMesh, placements: Placements, *, of: torch.Tensor | None = None
) -> DTensor:
    """The DTensor of which each rank has this part; parts may be uneven if it is known what they are `of`."""
    whole: dict[str, Any] = {} if of is None else {"shape": of.shape, "stride": of.stride()}
    return DTensor.from_local(part, devices, placements, run_check=False, **whole)


def own_part(weight: DTensor) -> torch.Tensor:
    """A rank's part of a weight that it multiplies by; of a whole one's gradient it has a part of a sum."""
    parts = [how if how.is_shard() else Partial() for how in weight.placements]
    return weight.to_local(grad_placements=parts)


def axes_of(tensor: torch.Tensor, mesh: Mesh) -> tuple[Axis, ...]:
    """The axes over which a DTensor, any shape, is split; none of any other tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    named = zip(axis_names(tensor.device_mesh), tensor.placements, strict=True)
    # Not is_shard: what two axes split along one dim is a placement of its own kind.
    cut = [name for name, how in named if not how.is_replicate()]
    return tuple(axis for axis in mesh.axes.values() if axis.name in cut and axis.size > 1)


def elements_of(tensor: torch.Tensor, mesh: Mesh) -> slice | None:
    """Elements of its flattened part along tp, (numel,), that ZeRO leaves this rank; None for all."""
    axes = axes_of(tensor, mesh)
    # Of experts, (E, ..), ep has its part, and leaves dp_shard to ZeRO.
    shards = mesh[DP_SHARD] if tensor.ndim > 2 and mesh[EP].size > 1 else mesh.joined(*SHARDS)
    if shards not in axes:
        return None
    assert isinstance(tensor, DTensor)
    rows, row = tensor.shape[0], math.prod(tensor.to_local().shape[1:])
    if mesh[TP] in axes and tensor.placements[axis_names(tensor.device_mesh).index(TP)].is_shard(0):
        own = chunk_slices(rows, mesh[TP].size)[mesh[TP].rank]
        rows = own.stop - own.start
    own = chunk_slices(rows, shards.size)[shards.rank]
    return slice(own.start * row, own.stop * row)


def empty_on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory on a device for a tensor of any shape, on the meta device; for the local part of a DTensor."""
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=device)
    part = torch.empty_like(tensor.to_local(), device=device)
    return local_part(part, tensor.device_mesh, tensor.placements, of=tensor)


def of_dtensors(
    parameters: Parameters, mesh: Mesh, *, module: nn.Module, finish: Callable[[], None], **options: Any
) -> Engine:
    """An engine over parameters as DTensors, which know the axes over which they are sharded.

    `finish` completes the gradients; the options are those of `Engine`.
    """

    def gather(pieces: TensorsByName) -> TensorsByName:
        full = {name: piece.full_tensor() for name, piece in pieces.items() if isinstance(piece, DTensor)}
        own = partial(in_order, ranks=mesh[TP].size, parts=parts)
        return {n: own(tensor) if FUSED in n else tensor for n, tensor in full.items()}

    parts = _parts(module)
    elements = {name: elements_of(parameter, mesh) for name, parameter in parameters.items()}
    return Engine(
        module=module,
        parameters=parameters,
        sharding=Sharding(
            axes={name: axes_of(parameter, mesh) for name, parameter in parameters.items()},
            elements={name: cut for name, cut in elements.items() if cut is not None},
            finish_gradients=lambda parameters: finish(),
            gather=gather,
        ),
        **options,
    )


FUSED = ".attn.c_attn."


@torch.no_grad()
def deal_heads(model: GPT, ranks: int) -> None:
    """Reorder the rows of each fused q, k, v: (q, k, v) by rank become rank by (q, k, v)."""
    for block in model.blocks:
        for parameter in block.get_submodule("attn.c_attn").parameters():
            parameter.copy_(parameter[_head_order(len(parameter), ranks, _parts(model))])


def in_order(tensor: torch.Tensor, ranks: int, parts: int) -> torch.Tensor:
    """The inverse of `deal_heads`, of a whole weight, bias, gradient or moment."""
    return tensor[_head_order(len(tensor), ranks, parts).argsort()]


def _parts(model: nn.Module) -> int:
    return next(m.qkv_parts for m in model.modules() if isinstance(m, CausalSelfAttention))


def _head_order(rows: int, ranks: int, parts: int) -> torch.Tensor:
    return torch.arange(rows).view(parts, ranks, -1).transpose(0, 1).flatten()


def dtensor_optimizer(
    params: list[dict], optimizer_cls: type[torch.optim.Optimizer], **kwargs
) -> torch.optim.Optimizer:
    """The optimizer over DTensors, which know PyTorch's fused Adam but not its fused SGD (torch 2.13)."""
    if optimizer_cls is torch.optim.SGD:
        kwargs |= {"fused": False, "foreach": True}
    return optimizer_cls(params, **kwargs)
