"""The mesh of a run: coordinates of the devices of each host, and axes that cross hosts."""

import math
from collections.abc import Sequence

from compare.show.figures import INK, NARROW, WIDE, Axes, Figure, colour, strip_axes
from compare.show.findings import Row, Table, Text
from compare.spec.axes import TP
from compare.spec.experiment import Layout

MOST_NAMED = 8
"""Largest number of columns of a mesh with room for names; wider meshes have numbers."""
PALE = 0.35
"""Opacity of a device's colour, so that text on it can be read on both grounds."""


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


def mesh_figure(layout: Layout, hosts: Sequence[str]) -> Figure:
    """A box for each device, in the colour of its host; the innermost axis from left to right.

    `hosts` as in `host_table`. The layout has several devices.
    """
    split = {axis: degree for axis, degree in layout.axes.items() if degree > 1}
    names, (inner, columns) = [*dict.fromkeys(hosts)], [*split.items()][-1]
    is_narrow, several = columns <= MOST_NAMED, len(names) > 1

    def draw(axes: Axes) -> None:
        heads = dict[float, str]()
        for device, host in enumerate(hosts):
            row, column = divmod(device, columns)
            heads[row + 0.5] = place_in_mesh(device, layout).rpartition(", ")[0]
            shade = colour(names.index(host)), PALE
            axes.broken_barh([(column + 0.04, 0.92)], (row + 0.04, 0.92), facecolor=shade, edgecolor=INK)
            text = f"device {device}{f', {host}' * several}".replace(", ", "\n") if is_narrow else f"{device}"
            axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize="small")
        strip_axes(axes, heads)
        axes.set_xticks([column + 0.5 for column in range(columns)], [f"{inner} {n}" for n in range(columns)])
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.set(xlim=(0, columns), ylim=(len(heads), 0))

    return Figure(
        title=f"The mesh: {' by '.join(f'{axis} {degree}' for axis, degree in split.items())}",
        caption=f"A colour is a host. {crossing_words(layout, len(names))}" if several else "On one host.",
        draw=draw,
        width=NARROW if is_narrow else WIDE,
        height=0.4 + 0.5 * layout.devices / columns,
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
