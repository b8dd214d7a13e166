"""The mesh: this rank's axes and device, made from the layout."""

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from compare.spec.axes import DATA, EP, REPLICAS, ROWS, SHARDS, joined, joined_of
from compare.spec.experiment import Layout
from compare.system.facts import cpu_model
from torchpar.comm.collectives import Axis
from torchpar.comm.gloo import is_gloo
from torchpar.comm.process_groups import make_group, make_group_again

EXPERTS_DATA = tuple(name for name in DATA if name != EP)
"""The axes along which the gradients of an expert are summed."""


@dataclass(frozen=True)
class Mesh:
    """One rank's view of all ranks: `mesh[TP]` is an axis, `mesh.joined(*ROWS)` is several axes as one."""

    axes: Mapping[str, Axis]
    """Single and joined axes by name."""
    world: Axis
    """All ranks, for communication outside of a step."""
    device: torch.device
    timeout: datetime.timedelta | None = None
    """The time-out of the groups; None: PyTorch's."""

    def __getitem__(self, name: str) -> Axis:
        return self.axes[name]

    def joined(self, *names: str) -> Axis:
        """Several axes as one, the first outermost. Axes of one rank are dropped, if another has more."""
        return self[joined_of(names, {name: self[name].size for name in names}) or names[-1]]

    def again(self, name: str) -> Axis:
        """An axis with a group of its own. On NCCL its calls do not wait for the calls of the first group.

        All ranks call this together. Under gloo it is the same axis.
        """
        axis = self[name]
        if axis.group is None or is_gloo(axis.group):
            return axis
        group = make_group_again(axis.group, name, self.timeout)
        return Axis(name, size=axis.size, rank=axis.rank, group=group)


def make_mesh(
    layout: Layout, *, rank: int, device: torch.device, timeout: datetime.timedelta | None = None
) -> Mesh:
    """The mesh of one rank. With more than one device the rank has joined the group of all ranks.

    `timeout` is of the groups; by default PyTorch's.
    """
    sizes = layout.axes
    grid = np.arange(layout.devices).reshape(tuple(sizes.values()))

    def make_axis(*names: str) -> Axis:
        """One axis, or several as one. All ranks make the same groups in the same order."""
        dims, size = [list(sizes).index(name) for name in names], math.prod(sizes[name] for name in names)
        lines = np.moveaxis(grid, dims, range(-len(dims), 0)).reshape(-1, size).tolist()
        line = next(line for line in lines if rank in line)
        group = make_group(lines, timeout) if size > 1 else None
        return Axis(joined(*names), size=size, rank=line.index(rank), group=group)

    # Axes that communicate as one: of rows, of data, of ZeRO's sums, of its shards, and of experts.
    together = (ROWS, DATA, REPLICAS, SHARDS, EXPERTS_DATA)
    several = {joined_of(names, sizes): [name for name in names if sizes[name] > 1] for names in together}
    axes = {name: make_axis(name) for name in sizes}
    axes |= {name: make_axis(*names) for name, names in several.items() if len(names) > 1}
    return Mesh(axes, world=make_axis(*sizes), device=device, timeout=timeout)


def device_kind(device: torch.device) -> str:
    """The model of the GPU or the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()
