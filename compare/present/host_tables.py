"""Hosts and their devices: who holds which coordinates of the mesh, and which axes cross hosts."""

import math
from collections.abc import Sequence

from compare.show.findings import Row, Table, Text
from compare.spec.axes import TP
from compare.spec.experiment import Layout


def host_table(layout: Layout, hosts: Sequence[str]) -> Table:
    """A row for each host, a column for each of its devices: its coordinates along the axes that split.

    Args:
        layout: whose devices they are.
        hosts: name of the host of every device, in the order of the mesh.
    """
    names = list(dict.fromkeys(hosts))
    held = {name: [device for device, host in enumerate(hosts) if host == name] for name in names}
    columns = [f"slot {place}" for place in range(max(map(len, held.values())))]
    rows = [
        Row(Text(name), [Text(f"device {device}: {coordinates(device, layout)}") for device in held[name]])
        for name in names
    ]
    return Table(
        name="Hosts and devices",
        corner="host",
        columns=columns,
        rows=rows,
        look="words",
        below=crossing_words(layout, len(names)),
    )


def planned_hosts(layout: Layout, count: int) -> list[str]:
    """Names for the hosts of a run that has not begun, one for each device."""
    return [f"host {device * count // layout.devices}" for device in range(layout.devices)]


def coordinates(device: int, layout: Layout) -> str:
    """`dp_shard 0, tp 1`: the place of a device along every axis that has more than one."""
    found, inside = [], layout.devices
    for axis, degree in layout.axes.items():
        inside //= degree
        if degree > 1:
            found.append(f"{axis} {device // inside % degree}")
    return ", ".join(found)


def crosses(axis: str, layout: Layout, hosts: int) -> bool:
    """Whether neighbours along an axis are on different hosts; devices fill one host after the other."""
    names = list(layout.axes)
    degree, inside = (
        layout.axes[axis],
        math.prod(layout.axes[name] for name in names[names.index(axis) + 1 :]),
    )
    host = [device * hosts // layout.devices for device in range(layout.devices)]
    return any(
        host[device] != host[device + inside]
        for device in range(layout.devices)
        if device // inside % degree < degree - 1
    )


def crossing_words(layout: Layout, hosts: int) -> str:
    """Which axes cross hosts, in a sentence; of tp also what that costs."""
    split = [axis for axis, degree in layout.axes.items() if degree > 1]
    across = [axis for axis in split if crosses(axis, layout, hosts)]
    inside = [axis for axis in split if axis not in across]
    parts = [f"{' and '.join(across) or 'no axis'} cross{'' if len(across) > 1 else 'es'} hosts"]
    if inside:
        parts.append(f"{' and '.join(inside)} stay{'' if len(inside) > 1 else 's'} inside one")
    words = ", ".join(parts)
    if TP in across:
        words += "; with tp every layer waits for the link between them, forward and backward"
    return f"{words}."
