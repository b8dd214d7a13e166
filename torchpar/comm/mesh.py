"""The mesh: this rank's axes and device, built from the layout and passed to what needs it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from compare.spec.axes import AXES, BATCH, DP_SHARD, joined
from compare.spec.experiment import Layout
from torchpar.comm.collectives import Axis
from torchpar.comm.counter import Traffic
from torchpar.comm.process_groups import make_group


@dataclass(frozen=True)
class Mesh:
    """One rank's view of all ranks.

    Attributes:
        pp: the stages of a pipeline.
        dp_replicate: groups of ranks with a replica each.
        dp_shard: the ranks that share out one replica's state.
        tp: the ranks that split each layer.
        data: dp_replicate and dp_shard together, dp_replicate outermost: who has its own rows of a batch.
        world: all ranks; for what is no part of a step.
        device: where this rank computes.
        traffic: the count that all axes share.
    """

    pp: Axis
    dp_replicate: Axis
    dp_shard: Axis
    tp: Axis
    data: Axis
    world: Axis
    device: torch.device
    traffic: Traffic

    @property
    def axes(self) -> list[Axis]:
        """Axes along which a step communicates, each once."""
        return list(dict.fromkeys((*(getattr(self, name) for name in AXES), self.data)))

    @property
    def sizes(self) -> dict[str, int]:
        """The number of ranks along each axis, by name."""
        return {axis.name: axis.size for axis in self.axes}


def make_mesh(layout: Layout, *, rank: int, device: torch.device, apart: bool = False) -> Mesh:
    """The mesh of a layout; with more than one device the process group must be there.

    Args:
        layout: the degrees.
        rank: this process among `layout.devices`.
        device: of this rank.
        apart: no axis of a step shares the group of all ranks.
    """
    traffic, sizes = Traffic(), layout.axes
    make = partial(_make_axis, sizes=sizes, rank=rank, traffic=traffic)
    axes = {name: make((name,), apart=apart) for name in sizes}
    real = [name for name in BATCH if sizes[name] > 1]
    data = make(tuple(real), apart=apart) if len(real) > 1 else axes[(*real, DP_SHARD)[0]]
    return Mesh(**axes, data=data, world=make(tuple(sizes)), device=device, traffic=traffic)


def _make_axis(
    names: tuple[str, ...], *, sizes: Mapping[str, int], rank: int, traffic: Traffic, apart: bool = False
) -> Axis:
    """The axis, or several axes as one, of the grid of ranks."""
    places = [list(sizes).index(name) for name in names]
    grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    size = math.prod(sizes[name] for name in names)
    lines = np.moveaxis(grid, places, range(-len(places), 0)).reshape(-1, size).tolist()
    mine = next(line for line in lines if rank in line)
    group = make_group(lines, apart=apart) if size > 1 else None
    return Axis(joined(*names), size=size, rank=mine.index(rank), group=group, traffic=traffic)
