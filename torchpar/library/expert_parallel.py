"""Expert parallelism by PyTorch: a collective that has a derivative, and FSDP2 over the ranks that ep leaves.

As torchtitan has it: `all_to_all_single_autograd` moves the rows, and `fully_shard` of a block's experts, a
unit of their own, runs over dp_shard without ep. It divides their gradients by those ranks alone, where a
mean is over all that have data: ep's share of it is divided on the way. (FSDP2 has a word for that, too,
`set_gradient_divide_factor`; but over one rank it divides twice, and else it asks for PREMUL_SUM, which gloo
has not: torch 2.13.) DDP has one group for a whole module: there is no expert parallelism beside it.
"""

from functools import partial

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from compare.contract.communication import RECORD
from compare.spec.axes import EP
from torchpar.comm.mesh import Mesh
from torchpar.manual.expert_parallel import ExchangeRows
from torchpar.model import GPT
from torchpar.private import all_to_all_single_autograd
from torchpar.sharding import Sharding, TensorsByName, divide_gradient


def share_out_experts(model: GPT, mesh: Mesh) -> Sharding:
    """Keep this rank's experts of every block, and send tokens to the others'; names of parameters stay."""
    axis, names = mesh[EP], set[str]()
    assert axis.group is not None
    for number, block in enumerate(model.blocks):
        for path in ("mlp.c_fc", "mlp.c_proj"):
            module = block.get_submodule(path)
            own = module.get_parameter("weight").chunk(axis.size)[axis.rank]
            module.register_parameter("weight", nn.Parameter(own))
            module.register_forward_hook(
                lambda _, inputs, weight: divide_gradient(weight.view_as(weight), axis.size)
            )
            names.add(f"transformer.h.{number}.{path}.weight")
        exchange = ExchangeRows(partial(all_to_all, group=axis.group), axis.size)
        block.set_submodule("mlp.core.exchange", exchange)

    def whole(piece: torch.Tensor) -> torch.Tensor:
        full = piece.new_empty(axis.size * len(piece), *piece.shape[1:])
        axis.all_gather(full.view(-1), piece.contiguous().view(-1), purpose=RECORD)
        return full

    def gather(pieces: TensorsByName) -> TensorsByName:
        return {name: whole(piece) if name in names else piece for name, piece in pieces.items()}

    return Sharding(axes=dict.fromkeys(names, (axis,)), gather=gather)


def all_to_all(rows: torch.Tensor, sent: list[int], came: list[int], *, group: ProcessGroup) -> torch.Tensor:
    """So many rows to each rank, so many from each: (S, ..) to (N, ..), in forward and backward."""
    return all_to_all_single_autograd(rows.contiguous(), came, sent, group)


def shard_experts(block: nn.Module, mesh: DeviceMesh, *, reshard_after_forward: bool) -> None:
    """A unit of FSDP2 of a block's experts."""
    core = block.get_submodule("mlp.core")
    for name in ("c_fc", "c_proj"):  # the unit is the module that uses them
        core.add_module(name, block.get_submodule(f"mlp.{name}"))
    fully_shard(core, mesh=mesh, reshard_after_forward=reshard_after_forward)
