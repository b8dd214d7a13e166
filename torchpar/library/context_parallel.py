"""Context parallelism by PyTorch: K and V are DTensors along the sequence, redistributed to whole ones.

A rank has the queries of its positions. Its keys and values go to all, in one all-gather each; backward sums
what the ranks have of their gradients, and leaves each rank its own: `Partial` becomes a reduce-scatter.

PyTorch has a ring, too, a prototype (2.13): under `torch.distributed.tensor.experimental.context_parallel`
`scaled_dot_product_attention` works on the K and V that are there while others come, and a causal mask is
balanced by head and tail, as zigzag does it. It takes three kernels of CUDA, flash, efficient and cuDNN: none
has float64, and dropout is the kernel's own. That of a CPU it does not know, and fails: "aten._scaled_dot_
product_flash_attention_for_cpu.default does not have a sharding strategy". What is here works everywhere; it
is what PyTorch does around FlexAttention (`flex_cp_allgather`).

Legend: B batch, T position of this rank, S position of all, K heads of keys and values, D head_dim.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from compare.numerics.context import order_of_positions
from compare.spec.axes import CP
from compare.spec.experiment import Layout
from torchpar.comm.mesh import Mesh
from torchpar.model import GPT
from torchpar.positions import take_positions


def split_sequence(model: GPT, mesh: Mesh, layout: Layout) -> None:
    """Say which positions a GPT has on this rank, and let its attention see all keys and values."""
    axis, length = mesh[CP], model.config.block_size
    assert axis.group is not None
    devices = DeviceMesh.from_group(axis.group, mesh.device.type, mesh_dim_names=(CP,))
    take_positions(model, layout, rank=axis.rank, device=mesh.device)
    position_T = model.positions(length // axis.size, device=mesh.device)
    position_S = torch.tensor(order_of_positions(length, layout), device=mesh.device)

    def whole(part_BTKD: torch.Tensor) -> torch.Tensor:
        split = DTensor.from_local(part_BTKD, devices, [Shard(1)], run_check=False)
        return split.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def gather(_: nn.Module, q_k_v: tuple) -> tuple:
        q_BTHD, k_BTKD, v_BTKD, *keys = q_k_v
        return q_BTHD, whole(k_BTKD), whole(v_BTKD), *keys

    for block in model.blocks:
        core = block.get_submodule("attn.core")
        core.seen_TS = position_T[:, None] >= position_S
        core.get_submodule("dropout").places = position_S
        core.register_forward_pre_hook(gather)
