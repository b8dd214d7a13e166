"""The ledger of any module: what PyTorch's dispatcher sees, with the place in the program that sent it.

with torchpar.ledger(mesh) as ledger:
    loss(model(x)).backward()
print(ledger)
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from compare.contract.ledger import Ledger
from torchpar.comm.mesh import Mesh
from torchpar.measure.ledger import LedgerMode


@contextmanager
def ledger_of(mesh: Mesh | DeviceMesh | None = None) -> Generator[Ledger]:
    """What this rank communicates inside, a row for each place; filled when it ends.

    Args:
        mesh: names the process groups; by default they are world and subgroup.
    """
    ledger, mode = Ledger(), LedgerMode(group_names(mesh))

    def updates(begins: bool) -> None:
        mode.is_updating = begins

    handles = [
        register_optimizer_step_pre_hook(lambda *_: updates(True)),
        register_optimizer_step_post_hook(lambda *_: updates(False)),
    ]
    try:
        with mode:
            yield ledger
    finally:
        for handle in handles:
            handle.remove()
        ledger.rows.extend(mode.noted().rows)


def group_names(mesh: Mesh | DeviceMesh | None) -> dict[str, str]:
    """The axis of every process group that has one, by the group's name."""
    groups = [(dist.group.WORLD, "world")] if dist.is_initialized() else []
    if isinstance(mesh, Mesh):
        groups += [(axis.group, axis.name) for axis in mesh.axes]
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or [f"dim {dim}" for dim in range(mesh.ndim)]
        groups += [(mesh.get_group(dim), name) for dim, name in enumerate(names)]
    return {str(group.group_name): name for group, name in groups if group}
