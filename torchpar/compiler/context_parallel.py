"""Context parallelism by placements: K and V are whole where attention begins, `Shard` becomes `Replicate`.

Everything else in a GPT treats a position as it treats a row. So to DTensor a part of a sequence is a row:
(n B, T / n, C), split by `Shard(0)` along cp, as along the axes of data. Nothing is sent for it, and weights'
gradients are partial sums over cp, too. In front of attention a rank's parts are of (B, T, K, D), split by
`Shard(1)`: K and V become `Replicate`, which gathers them, and what a rank has of their gradients is
`Partial`, which is scattered. The core is told by a mask which positions its queries see.

`Shard(1)` everywhere would be as true. But a linear layer joins B and T, which makes of split positions a
strided shard, and where tp splits such a layer DTensor (2.13) gathers it: 13 times the bytes of K and V.

The two other ways are not here. Ulysses is `Shard(1)` to `Shard(2)`, from positions to heads, and back: an
all-to-all, of which DTensor makes on a CPU a gather, where each rank throws away all but its own. And no
placement says that something passes by: so there is no ring.

Legend: B batch, T position, t this rank's, K heads of keys and values, D head_dim, n ranks of cp.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from compare.spec.axes import CP
from compare.spec.experiment import Layout
from torchpar.dtensors import local_part
from torchpar.model import GPT
from torchpar.positions import see_gathered


def split_sequence(model: GPT, devices: DeviceMesh, layout: Layout) -> None:
    """Say that attention needs the keys and values of all positions, and which of them a query sees.

    The positions themselves differ from rank to rank, which DTensor need not know: they are only looked up.
    """
    ranks, device = devices[CP], torch.device(devices.device_type)
    see_gathered(model, layout, rank=ranks.get_local_rank(), device=device)

    def whole(part_BtKD: torch.Tensor) -> torch.Tensor:
        own_BtKD = part_BtKD.to_local() if isinstance(part_BtKD, DTensor) else part_BtKD
        whole_BTKD = local_part(own_BtKD, ranks, (Shard(1),)).redistribute(placements=[Replicate()])
        return whole_BTKD.to_local(grad_placements=[Partial()])

    def attention_begins(_: nn.Module, q_k_v: tuple) -> tuple:
        q_BtHD, k_BtKD, v_BtKD, *keys = q_k_v
        return q_BtHD, whole(k_BtKD), whole(v_BtKD), *keys

    for block in model.blocks:
        block.get_submodule("attn.core").register_forward_pre_hook(attention_begins)
