"""Expert parallelism by PyTorch: an all-to-all with a derivative, and FSDP2 over the ranks that ep leaves.

    counts      all-to-all    the number of rows for each expert, so that a rank knows what arrives
    dispatch    all-to-all    rows to the ranks of their experts; backward returns the gradients of the rows
    combine     all-to-all    outputs back to the ranks of their rows; backward sends their gradients

`ExchangeRows` of torch-manual sends the three messages by `all_to_all` below, and waits for each. The
gradient of an expert is then a sum over the rows of all ranks of ep. `fully_shard` makes a block's experts a
unit of their own, over dp_shard without ep. It divides their gradients by the number of those ranks only, but
the mean is over all ranks of the data. So the gradient is divided by ep's ranks first.

FSDP2's own `set_gradient_divide_factor` requires PREMUL_SUM, which gloo does not have.

DDP reduces all parameters over one group, so it cannot be combined with expert parallelism.
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


def shard_experts(model: GPT, mesh: Mesh) -> Sharding:
    """Keep this rank's experts of every block, and exchange rows with the other ranks. Names stay."""
    axis, names = mesh[EP], set[str]()
    assert axis.group is not None
    for number, block in enumerate(model.blocks):
        for path in ("mlp.c_fc", "mlp.c_proj"):
            module = block.get_submodule(path)
            experts = module.get_parameter("weight").chunk(axis.size)[axis.rank]
            module.register_parameter("weight", nn.Parameter(experts))
            # FSDP2 divides by the ranks of dp_shard without ep: divide by ep's ranks here.
            module.register_forward_hook(
                lambda _, inputs, weight: divide_gradient(weight.view_as(weight), axis.size)
            )
            names.add(f"transformer.h.{number}.{path}.weight")
        # Three all-to-alls: counts, rows to their experts, outputs back. Backward repeats the last two.
        exchange = ExchangeRows(partial(all_to_all, group=axis.group), axis.size)
        block.set_submodule("mlp.core.exchange", exchange)

    def gather(shards: TensorsByName) -> TensorsByName:
        return {n: axis.all_gather_dim(t, 0, purpose=RECORD) if n in names else t for n, t in shards.items()}

    return Sharding(axes=dict.fromkeys(names, (axis,)), gather=gather)


def all_to_all(
    rows: torch.Tensor, sent: list[int], received: list[int], *, group: ProcessGroup
) -> torch.Tensor:
    """Send `sent[r]` rows to each rank r, and receive `received[r]` rows; in backward their gradients."""
    return all_to_all_single_autograd(rows.contiguous(), received, sent, group)


def make_expert_unit(block: nn.Module, mesh: DeviceMesh, *, reshard_after_forward: bool) -> None:
    """Make a block's experts a unit of FSDP2."""
    core = block.get_submodule("mlp.core")
    for name in ("c_fc", "c_proj"):  # FSDP2 gathers them when the core runs
        core.add_module(name, block.get_submodule(f"mlp.{name}"))
    fully_shard(core, mesh=mesh, reshard_after_forward=reshard_after_forward)
