"""Context parallelism by PyTorch: K and V are DTensors along the sequence, redistributed to whole ones.

A rank has the queries of its positions. Its keys and values go to all, in one all-gather each; backward sums
what the ranks have of their gradients, and leaves each rank its own: `Partial` becomes a reduce-scatter.

PyTorch has a ring, too, a prototype (2.13): under `torch.distributed.tensor.experimental.context_parallel`
`scaled_dot_product_attention` works on the K and V that are there while others come, and a causal mask is
balanced by head and tail, as zigzag does it. It takes three kernels of CUDA, flash, efficient and cuDNN: none
has float64, and dropout is the kernel's own. That of a CPU it does not know, and fails: "aten._scaled_dot_
product_flash_attention_for_cpu.default does not have a sharding strategy". What is here works everywhere; it
is what PyTorch does around FlexAttention (`flex_cp_allgather`).

Legend: B batch, T position, t this rank's, K heads of keys and values, D head_dim.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from compare.spec.axes import CP
from compare.spec.experiment import Layout
from torchpar.comm.mesh import Mesh
from torchpar.model import GPT
from torchpar.positions import see_gathered


def split_sequence(model: GPT, mesh: Mesh, layout: Layout) -> None:
    """Say which positions a GPT has on this rank, and let its attention see all keys and values."""
    axis = mesh[CP]
    assert axis.group is not None
    devices = DeviceMesh.from_group(axis.group, mesh.device.type, mesh_dim_names=(CP,))
    see_gathered(model, layout, rank=axis.rank, device=mesh.device)

    def whole(part_BtKD: torch.Tensor) -> torch.Tensor:
        split = DTensor.from_local(part_BtKD, devices, [Shard(1)], run_check=False)
        return split.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def gather(_: nn.Module, q_k_v: tuple) -> tuple:
        q_BtHD, k_BtKD, v_BtKD, *keys = q_k_v
        return q_BtHD, whole(k_BtKD), whole(v_BtKD), *keys

    for block in model.blocks:
        block.get_submodule("attn.core").register_forward_pre_hook(gather)
