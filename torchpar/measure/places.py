"""The ledger of any module: what every thread of this rank sends, with the place in the program that sent it.

with torchpar.ledger(mesh) as ledger:
    loss(model(x)).backward()
print(ledger)
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from compare.contract.ledger import Ledger
from torchpar.comm.mesh import Mesh
from torchpar.measure.ledger import LedgerMode


@contextmanager
def ledger_of(mesh: Mesh | DeviceMesh | None = None) -> Generator[Ledger]:
    """Ledger of this rank's communication inside, a row for each place; filled when it ends.

    Args:
        mesh: names the process groups; by default they are world and subgroup.
    """
    ledger, mode = Ledger(), LedgerMode(group_names(mesh))
    try:
        with mode:
            yield ledger
    finally:
        noted = mode.noted()
        ledger.rows.extend(noted.rows)
        ledger.problems.extend(noted.problems)


def group_names(mesh: Mesh | DeviceMesh | None) -> dict[str, str]:
    """The axis of every process group that has one, by the group's name."""
    groups = [(dist.group.WORLD, "world")] if dist.is_initialized() else []
    if isinstance(mesh, Mesh):
        groups += [(axis.group, axis.name) for axis in mesh.axes.values()]
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or [f"dim {dim}" for dim in range(mesh.ndim)]
        groups += [(mesh.get_group(dim), name) for dim, name in enumerate(names)]
    return {str(group.group_name): name for group, name in groups if group}
