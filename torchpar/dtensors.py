"""DTensors: a DeviceMesh over the process groups of our mesh, and engines whose parameters are DTensors."""

import math
from collections.abc import Callable, Sequence
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
from torchpar.qkv_order import FUSED, qkv_parts, unpermute_qkv
from torchpar.sharding import Parameters, Sharding, TensorsByName

ALONE = dist.Backend.FAKE
"""PyTorch's group without communication, which copies inputs to outputs. `private` registers it."""
Placements = tuple[Placement, ...]


def make_device_mesh(mesh: Mesh, names: Sequence[str]) -> DeviceMesh:
    """A DeviceMesh of these axes, single or joined, in this order. All other axes have one rank."""
    axes = [mesh[name] for name in names]
    alone: dist.ProcessGroup | None = None
    if any(axis.group is None for axis in axes):
        # An axis of one rank has no group, but a DeviceMesh requires one. NCCL would take 512 MiB of the GPU.
        alone = dist.new_group([mesh.world.rank], backend=ALONE, use_local_synchronization=True)
        assert isinstance(alone, dist.ProcessGroup)
    groups: list[Any] = [axis.group or alone for axis in axes]
    ranks = np.arange(mesh.world.size).reshape([mesh[name].size for name in AXES])
    named = [single for name in names for single in parts_of(name)]
    order = [AXES.index(name) for name in (*named, *(name for name in AXES if name not in named))]
    return DeviceMesh.from_group(
        groups,
        mesh.device.type,
        mesh=ranks.transpose(order).reshape([axis.size for axis in axes]),
        mesh_dim_names=tuple(names),
    )


def axis_names(devices: DeviceMesh) -> tuple[str, ...]:
    """Names of a mesh's axes, outermost first."""
    names = devices.mesh_dim_names
    assert names is not None
    return names


def from_local(
    tensor: torch.Tensor, devices: DeviceMesh, placements: Placements, *, like: torch.Tensor | None = None
) -> DTensor:
    """The DTensor of which each rank has this local tensor. Uneven shards need `like`, of the full shape."""
    full: dict[str, Any] = {} if like is None else {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(tensor, devices, placements, run_check=False, **full)


def local_weight(weight: DTensor) -> torch.Tensor:
    """The local shard of a weight. The gradient of a replicated weight is a partial sum."""
    placements = [placement if placement.is_shard() else Partial() for placement in weight.placements]
    return weight.to_local(grad_placements=placements)


def axes_of(tensor: torch.Tensor, mesh: Mesh) -> tuple[Axis, ...]:
    """The axes over which a DTensor, any shape, is sharded; none for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    named = zip(axis_names(tensor.device_mesh), tensor.placements, strict=True)
    # Not `is_shard`: where two axes shard one dim, PyTorch has another class of placement.
    sharded = [name for name, placement in named if not placement.is_replicate()]
    return tuple(axis for axis in mesh.axes.values() if axis.name in sharded and axis.size > 1)


def elements_of(tensor: torch.Tensor, mesh: Mesh) -> slice | None:
    """The slice of this rank's flat tp shard that ZeRO assigns to it. None: all of it."""
    axes = axes_of(tensor, mesh)
    # ep shards experts, (E, ...), and ZeRO only over dp_shard.
    shards = mesh[DP_SHARD] if tensor.ndim > 2 and mesh[EP].size > 1 else mesh.joined(*SHARDS)
    if shards not in axes:
        return None
    assert isinstance(tensor, DTensor)
    rows, row = tensor.shape[0], math.prod(tensor.to_local().shape[1:])
    if mesh[TP] in axes and tensor.placements[axis_names(tensor.device_mesh).index(TP)].is_shard(0):
        by_tp = chunk_slices(rows, mesh[TP].size)[mesh[TP].rank]
        rows = by_tp.stop - by_tp.start
    by_zero = chunk_slices(rows, shards.size)[shards.rank]
    return slice(by_zero.start * row, by_zero.stop * row)


def empty_on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory on a device for a tensor of the meta device, of any shape; of a DTensor for the local shard."""
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=device)
    shard = torch.empty_like(tensor.to_local(), device=device)
    return from_local(shard, tensor.device_mesh, tensor.placements, like=tensor)


def engine_of_dtensors(
    parameters: Parameters, mesh: Mesh, *, module: nn.Module, finish: Callable[[], None], **options: Any
) -> Engine:
    """An engine whose parameters are DTensors.

    `finish` completes the gradients; the options are those of `Engine`.
    """
    parts = qkv_parts(module)

    def gather(shards: TensorsByName) -> TensorsByName:
        full = {name: shard.full_tensor() for name, shard in shards.items() if isinstance(shard, DTensor)}
        return {n: unpermute_qkv(t, mesh[TP].size, parts) if FUSED in n else t for n, t in full.items()}

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


def dtensor_optimizer(
    params: list[dict], optimizer_cls: type[torch.optim.Optimizer], **kwargs
) -> torch.optim.Optimizer:
    """An optimizer over DTensors: they support PyTorch's fused Adam, but not its fused SGD."""
    if optimizer_cls is torch.optim.SGD:
        kwargs |= {"fused": False, "foreach": True}
    return optimizer_cls(params, **kwargs)
