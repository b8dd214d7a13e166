"""Context parallelism by placements: in front of attention, K and V go from `Shard` to `Replicate`.

All other layers treat a position as they treat a row. So to DTensor a part of a sequence is a row: (n B, T /
n, C) is `Shard(0)` along cp, as along the axes of data. Nothing moves, and gradients of weights are partial
sums over cp too. In front of attention the local tensors are shards of (B, T, K, D), `Shard(1)`. K and V
become `Replicate`, which is an all-gather. Their gradients are `Partial`, which become a reduce-scatter. A
mask selects the positions that each query sees.

`Shard(1)` everywhere would be correct too. But a linear layer merges B and T, and split positions then make a
strided shard. Where tp splits the layer, DTensor gathers it: 13 times the bytes of K and V.

Ulysses would be `Shard(1)` to `Shard(2)`, an all-to-all. On a CPU DTensor gathers instead, and each rank
keeps its own shard. A ring cannot be placed: no placement describes keys that pass from rank to rank.

B batch, T position, t this rank's positions, K heads of keys and values, D head_dim, n ranks of cp.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from compare.spec.axes import CP
from compare.spec.experiment import Layout
from torchpar.dtensors import from_local
from torchpar.model import GPT
from torchpar.positions import set_gathered_mask


def split_sequence(model: GPT, devices: DeviceMesh, layout: Layout) -> None:
    """Give a GPT this rank's positions, and its attention the keys and values of all positions."""
    ranks, device = devices[CP], torch.device(devices.device_type)
    set_gathered_mask(model, layout, rank=ranks.get_local_rank(), device=device)

    def replicate(x_BtKD: torch.Tensor) -> torch.Tensor:
        local_BtKD = x_BtKD.to_local() if isinstance(x_BtKD, DTensor) else x_BtKD
        x_BTKD = from_local(local_BtKD, ranks, (Shard(1),)).redistribute(placements=[Replicate()])
        return x_BTKD.to_local(grad_placements=[Partial()])

    def before_core(_: nn.Module, q_k_v: tuple) -> tuple:
        q_BtHD, k_BtKD, v_BtKD, *keys = q_k_v
        return q_BtHD, replicate(k_BtKD), replicate(v_BtKD), *keys

    for block in model.blocks:
        block.get_submodule("attn.core").register_forward_pre_hook(before_core)
