"""Hosts and their devices: who holds which coordinates of the mesh, and what crosses from host to host."""

from collections.abc import Mapping, Sequence

from compare.judge.across_hosts import Crossing
from compare.judge.closed_forms.across_hosts import crosses
from compare.show.findings import Row, Table, Text
from compare.spec.axes import TP
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Layout

NONE, AS_EXPECTED = "\N{EN DASH}", "="


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


def crossing_table(found: Mapping[str, Sequence[Crossing]]) -> Table:
    """Bytes that cross hosts in a step, of all devices together: by axis, closed form and engines.

    Args:
        found: of each engine.
    """
    sides = {ENGINES[engine].side: engine for engine in found}
    rows = []
    for axis in dict.fromkeys(one.axis for ones in found.values() for one in ones):
        own = {engine: [one for one in ones if one.axis == axis] for engine, ones in found.items()}
        sizes = [sum(one.closed_form for one in own[engine]) for engine in sides.values()]
        form = " / ".join(dict.fromkeys(f"{size:,.0f}" if size else NONE for size in sizes))
        rows.append(Row(Text(axis), [Text(form), *map(_cell, own.values())]))
    return Table(
        name="Bytes across hosts in a step, all devices together",
        corner="axis",
        columns=["closed form", *found],
        rows=rows,
        words=1,
    )


def _cell(ones: Sequence[Crossing]) -> Text:
    """What one engine sent: = for the closed form's bytes."""
    total, wrong = sum(one.found for one in ones), [one for one in ones if not one.is_as_expected]
    if wrong:
        return Text(f"{total:,}", "; ".join(map(str, wrong)), "fail")
    if abs(total - sum(one.closed_form for one in ones)) <= sum(one.rows for one in ones):
        return Text(AS_EXPECTED if total else NONE, news="pass")
    return Text(f"{total:,}", news="known")
