"""Bytes that cross hosts in a step, in closed form: from the layout, the hosts, and the bytes of a device.

D devices are numbered in the order of the mesh and host after host, m = D / H on each of H hosts. Devices of
a group along an axis of n are as far apart as the axes inside of it are long, `stride`:

    stride n <= m             inside a host: nothing crosses
    stride < m < stride n     stride n / m hosts, m / stride devices on each
    m <= stride               n hosts, a device on each

On a ring through a group on h > 1 hosts h devices send to another host, each what it sends on a ring:

    an all-reduce of S bytes     D / n groups x h x 2 (n - 1) / n S
    a gather or a scatter        D / n groups x h x (n - 1) / n S
    a message to a stage         S for each device whose next, or last, stage is on another host

for all devices together. Where sizes do not divide groups differ: here each is counted by itself.
"""

from collections.abc import Iterator

import numpy as np

from compare.contract.communication import ACTIVATION_GRADIENTS, TIED_GRADIENTS
from compare.spec.experiment import Layout

ON_A_RING = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""By kind: how often the n - 1 hops of a ring are made, with S / n bytes each."""


def host_of(device: int, layout: Layout, hosts: int) -> int:
    """The host of a device of the mesh."""
    return device * hosts // layout.devices


def crosses(axis: str, layout: Layout, hosts: int) -> bool:
    """Whether a group along an axis has devices on several hosts."""
    return any(
        host_of(sender, layout, hosts) != host_of(receiver, layout, hosts)
        for _, _, sender, receiver in _edges(axis, layout, step=1)
    )


def crossing(
    kind: str, axis: str, purpose: str, size: float, *, layout: Layout, hosts: int, stage: int
) -> float:
    """Bytes that all devices of a pipeline's rank send to other hosts.

    Args:
        kind, axis, purpose: as in the ledger.
        size: logical bytes of a device.
        layout, hosts: which devices are where.
        stage: the rank of the pipeline.
    """
    edges = _edges(axis, layout, step=_step(kind, purpose, stage, layout))
    here = [
        (n, place, sender, receiver)
        for n, place, sender, receiver in edges
        if layout.stage_of(sender) == stage
    ]
    across = [
        (n, place)
        for n, place, sender, receiver in here
        if host_of(sender, layout, hosts) != host_of(receiver, layout, hosts)
    ]
    if kind in ON_A_RING:
        return sum(ON_A_RING[kind] * (n - 1) / n * size for n, _ in across)
    if kind == "permute":
        return size * len(across)
    if kind == "broadcast":  # handed on along a line
        return size * sum(place < n - 1 for n, place in across)
    raise ValueError(f"{kind} over {axis}: no closed form of what crosses hosts")


def _step(kind: str, purpose: str, stage: int, layout: Layout) -> int:
    """To which neighbour along the axis a device sends: gradients go back, and ends send to each other."""
    if kind != "permute":
        return 1
    if purpose == TIED_GRADIENTS:
        return 1 if stage == layout.pp - 1 else -1
    return -1 if purpose == ACTIVATION_GRADIENTS else 1


def _edges(axis: str, layout: Layout, *, step: int) -> Iterator[tuple[int, int, int, int]]:
    """Of each device: size of its group, its place there, itself, and to whom it sends."""
    names = list(layout.axes)
    places = [names.index(name) for name in axis.split("+")]
    grid = np.arange(layout.devices).reshape(tuple(layout.axes.values()))
    size = int(np.prod([grid.shape[place] for place in places]))
    for line in np.moveaxis(grid, places, range(-len(places), 0)).reshape(-1, size).tolist():
        for place, sender in enumerate(line):
            yield size, place, sender, line[(place + step) % size]
