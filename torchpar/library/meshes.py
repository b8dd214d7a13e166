"""PyTorch's DeviceMesh over the process groups that the axes of our mesh have already; DTensors."""

import math

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from compare.spec.axes import AXES
from torchpar.comm.chunks import chunk_slices
from torchpar.comm.collectives import Axis
from torchpar.comm.mesh import Mesh
from torchpar.parallel_model import TensorsByName


def make_device_mesh(mesh: Mesh) -> DeviceMesh:
    """A mesh of all axes, to be cut by name: `devices[DP_SHARD]`."""
    axes = [getattr(mesh, name) for name in AXES]
    # An axis of one rank has no group, but a DeviceMesh wants one.
    alone = dist.new_group([mesh.world.rank], use_local_synchronization=True)
    assert isinstance(alone, dist.ProcessGroup)
    return DeviceMesh.from_group(
        [axis.group or alone for axis in axes],
        mesh.device.type,
        mesh=np.arange(mesh.world.size).reshape([axis.size for axis in axes]),
        mesh_dim_names=tuple(axis.name for axis in axes),
    )


def axes_of(tensor: torch.Tensor, mesh: Mesh) -> tuple[Axis, ...]:
    """The axes over which a DTensor, any shape, is split."""
    assert isinstance(tensor, DTensor)
    names = tensor.device_mesh.mesh_dim_names
    assert names is not None
    # Not is_shard: what two axes split along one dim is a placement of its own kind.
    cut = [name for name, how in zip(names, tensor.placements, strict=True) if not how.is_replicate()]
    return tuple(axis for axis in mesh.axes if axis.name in cut and axis.size > 1)


def elements_of(tensor: torch.Tensor, mesh: Mesh) -> slice | None:
    """Elements of its flattened part along tp, (numel,), that FSDP2 leaves this rank; None for all."""
    axes = axes_of(tensor, mesh)
    if mesh.dp_shard not in axes:
        return None
    assert isinstance(tensor, DTensor)
    rows, row = tensor.shape[0], math.prod(tensor.to_local().shape[1:])
    if mesh.tp in axes and tensor.placements[-1].is_shard(0):
        own = chunk_slices(rows, mesh.tp.size)[mesh.tp.rank]
        rows = own.stop - own.start
    own = chunk_slices(rows, mesh.dp_shard.size)[mesh.dp_shard.rank]
    return slice(own.start * row, own.stop * row)


def full_tensors(parts: TensorsByName) -> TensorsByName:
    """Whole tensors by name, from DTensors."""
    return {name: part.full_tensor() for name, part in parts.items() if isinstance(part, DTensor)}


def dtensor_optimizer(
    params: list[dict], optimizer_cls: type[torch.optim.Optimizer], **kwargs
) -> torch.optim.Optimizer:
    """The optimizer over DTensors, which know PyTorch's fused Adam but not its fused SGD (torch 2.13)."""
    if optimizer_cls is torch.optim.SGD:
        kwargs |= {"fused": False, "foreach": True}
    return optimizer_cls(params, **kwargs)
