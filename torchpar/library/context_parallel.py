"""Context parallelism by PyTorch: K and V are DTensors along the sequence, redistributed to replicated ones.

A rank has the queries of its positions. One all-gather of K and one of V bring it the keys and values of all
positions. In backward each rank has partial gradients of all of them: `Partial` becomes a reduce-scatter.

PyTorch has a ring, too: `torch.distributed.tensor.experimental.context_parallel`. It requires one of three
CUDA kernels of scaled_dot_product_attention, none of which supports float64 or this project's dropout. The
gather here runs on all devices. PyTorch does the same for FlexAttention (`flex_cp_allgather`).

B batch, T position, t this rank's positions, K heads of keys and values, D head_dim.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from compare.spec.axes import CP
from compare.spec.experiment import Layout
from torchpar.comm.mesh import Mesh
from torchpar.model import GPT
from torchpar.positions import set_gathered_mask


def split_sequence(model: GPT, mesh: Mesh, layout: Layout) -> None:
    """Give a GPT this rank's positions, and its attention the keys and values of all positions."""
    axis = mesh[CP]
    assert axis.group is not None
    devices = DeviceMesh.from_group(axis.group, mesh.device.type, mesh_dim_names=(CP,))
    set_gathered_mask(model, layout, rank=axis.rank, device=mesh.device)

    def gather(x_BtKD: torch.Tensor) -> torch.Tensor:
        split = DTensor.from_local(x_BtKD, devices, [Shard(1)], run_check=False)
        # all-gather in forward, reduce-scatter in backward
        return split.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def before_core(_: nn.Module, q_k_v: tuple) -> tuple:
        q_BtHD, k_BtKD, v_BtKD, *keys = q_k_v
        return q_BtHD, gather(k_BtKD), gather(v_BtKD), *keys

    for block in model.blocks:
        block.get_submodule("attn.core").register_forward_pre_hook(before_core)
