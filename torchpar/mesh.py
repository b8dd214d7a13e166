"""The mesh: this rank's axes and device, built from the layout and passed to whoever needs it."""

from dataclasses import dataclass

import torch

from compare.contract.experiment import Layout
from torchpar.collectives import Axis, Traffic, world_group


@dataclass(frozen=True)
class Mesh:
    """One rank's view of all ranks.

    Attributes:
        dp_replicate: the axis of the data-parallel replicas.
        device: where this rank computes.
        traffic: the count that all axes share.
    """

    dp_replicate: Axis
    device: torch.device
    traffic: Traffic

    @property
    def sizes(self) -> dict[str, int]:
        """The number of ranks along each axis, by name."""
        return {self.dp_replicate.name: self.dp_replicate.size}


def make_mesh(layout: Layout, *, rank: int, device: torch.device) -> Mesh:
    """The mesh of a layout; with more than one device the process group must be there.

    Args:
        layout: the degrees.
        rank: this process among `layout.devices`.
        device: its own.
    """
    traffic = Traffic()
    replicas = Axis(
        "dp_replicate",
        size=layout.dp_replicate,
        rank=rank,
        group=world_group() if layout.devices > 1 else None,
        traffic=traffic,
    )
    return Mesh(dp_replicate=replicas, device=device, traffic=traffic)
