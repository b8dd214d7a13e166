"""Coordinates of the devices of each host, and axes that cross hosts."""

import math
from collections.abc import Sequence

from compare.show.findings import Row, Table, Text
from compare.spec.axes import TP
from compare.spec.experiment import Layout


def host_table(layout: Layout, hosts: Sequence[str]) -> Table:
    """A row for each host, with the coordinates of each of its devices.

    `hosts` has the host's name of every device, in the order of the mesh.
    """
    slots: dict[str, list[Text]] = {}
    for device, host in enumerate(hosts):
        text = Text(f"device {device}: {place_in_mesh(device, layout)}")
        slots.setdefault(host, []).append(text)
    most = max(map(len, slots.values()))
    return Table(
        name="Hosts and devices",
        corner="host",
        columns=[f"slot {slot}" for slot in range(most)],
        rows=[Row(Text(host), texts) for host, texts in slots.items()],
        words=most,
        below=crossing_words(layout, len(slots)),
    )


def place_in_mesh(device: int, layout: Layout) -> str:
    """`dp_shard 0, tp 1`: the position of a device along every axis that has more than one."""
    position = layout.coordinates(device)
    return ", ".join(f"{axis} {position[axis]}" for axis, degree in layout.axes.items() if degree > 1)


def crosses(axis: str, layout: Layout, hosts: int) -> bool:
    """Whether neighbours along an axis are on different hosts. Devices fill the hosts in order."""
    names = list(layout.axes)
    block = math.prod(layout.axes[name] for name in names[names.index(axis) :])
    return layout.axes[axis] > 1 and layout.devices // hosts % block != 0


def crossing_words(layout: Layout, hosts: int) -> str:
    """A sentence with the axes that cross hosts, and a warning for tp."""
    split = [axis for axis, degree in layout.axes.items() if degree > 1]
    across = [axis for axis in split if crosses(axis, layout, hosts)]
    inside = [axis for axis in split if axis not in across]
    words = f"Across hosts: {', '.join(across) or 'no axis'}; inside one: {', '.join(inside) or 'none'}."
    if TP in across:
        words += " With tp every layer waits for the link between hosts, forward and backward."
    return words
