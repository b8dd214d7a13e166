"""Memory of a device between two steps and at the peak of a step, by class, with the estimates."""

import itertools
from collections.abc import Mapping

from compare.contract.memory_profile import CLASSES, MEANINGS, Curve, Peak
from compare.contract.record import ON_HOST, Record
from compare.show.figures import COLOURS, INK, Axes, Figure
from compare.show.findings import NONE, Row, Table, Text
from compare.terminal import human_bytes
from compare.theory.memory import KINDS, bytes_at_rest
from compare.theory.peak import peak_per_device

MANY_PHASES = 12
"""Largest number of phases whose names fit into a figure."""


def place_of(peak: Peak) -> str:
    """The operation at a peak, and its place in the program."""
    return peak.operation + (f" in {peak.place}" if peak.place else "")


def resting_table(records: Mapping[str, Record]) -> Table:
    """Bytes of the fullest device of each case between two steps, by kind."""
    columns = [_resting_cells(record) for record in records.values()]
    names = [*KINDS, "all", *(["in the host's memory"] if any(len(cells) > 4 for cells in columns) else [])]
    cells = itertools.zip_longest(*columns, fillvalue=Text("none"))
    return Table(
        name="Memory at rest",
        corner="fullest device",
        columns=list(records),
        rows=[Row(Text(name), list(row), name == "all") for name, row in zip(names, cells, strict=True)],
        below="Between two steps, gradients as they are just before the optimizer's; “of” is the closed form "
        "for that device, computed from the layout alone.",
    )


def _resting_cells(record: Record) -> list[Text]:
    """Bytes of each kind, their sum, and bytes that offload moved to the host."""
    manifest = record.manifest
    measured, expected = manifest.resident_bytes, bytes_at_rest(manifest.engine, manifest.experiment)
    if not measured:
        return [Text("not recorded")] * (len(KINDS) + 1)
    device = max(range(manifest.devices), key=lambda d: sum(measured[kind][d] for kind in KINDS))
    pairs = [(measured[kind][device], expected[kind][device]) for kind in KINDS]
    pairs.append((sum(size for size, _ in pairs), sum(form for _, form in pairs)))
    cells = []
    for size, form in pairs:
        off = round(size / form - 1, 3) if form else 0.0
        cells.append(Text(human_bytes(size), f"of {human_bytes(form)}{f', {off:+.1%}' if off else ''}"))
    on_host = measured.get(ON_HOST, [0] * manifest.devices)[device]
    return [*cells, *([Text(human_bytes(on_host))] if on_host else [])]


def peak_tables(records: Mapping[str, Record]) -> list[Table]:
    """Bytes of the fullest device at the peak of the watched step, by class, for cases that recorded them."""
    profiles = {name: one.memory for name, one in records.items() if one.memory and one.memory.devices}
    if not profiles:
        return []
    peaks = {name: profile.devices[profile.fullest].peak for name, profile in profiles.items()}
    classes = [kind for kind in CLASSES if any(peak.bytes.get(kind) for peak in peaks.values())]
    rows = [
        Row(
            Text(kind, MEANINGS[kind]),
            [Text(human_bytes(size) if (size := peak.bytes.get(kind)) else NONE) for peak in peaks.values()],
        )
        for kind in classes
    ]
    totals = []
    for name, peak in peaks.items():
        manifest = records[name].manifest
        most = peak_per_device(manifest.engine, manifest.experiment)[profiles[name].fullest]
        totals.append(Text(human_bytes(peak.total), f"estimated: {human_bytes(most)}"))
    rows.append(Row(Text("all"), totals, is_total=True))
    rows.append(Row(Text("where"), [Text(peak.phase or NONE, place_of(peak)) for peak in peaks.values()]))
    name = "Memory at the peak of a step"
    return [Table(name=name, corner="class, of the fullest device", columns=list(peaks), rows=rows)]


def memory_figures(records: Mapping[str, Record]) -> list[Figure]:
    """Memory of the fullest device over the watched step, for cases that recorded a curve."""
    figures = []
    for name, record in records.items():
        if not (profile := record.memory) or not profile.devices:
            continue
        device = profile.devices[profile.fullest]
        if device.curve:
            which = f"Device {profile.fullest}" if len(profile.devices) > 1 else "Every device"
            where = f"in {device.peak.phase}: {place_of(device.peak)}"
            caption = f"{which}; the dotted line is the peak, {where}. Measured by: {profile.method}."
            title = f"Memory of {name} over a step"
            figures.append(memory_figure(title, device.curve, device.peak, caption=caption))
    return figures


def memory_figure(title: str, curve: Curve, peak: Peak, *, caption: str) -> Figure:
    """Memory of one device over a step: an area for each class, and a line at the peak."""
    heights: dict[str, list[float]] = {
        kind: [size / 1e6 for size in curve.bytes[kind]] for kind in CLASSES if any(curve.bytes.get(kind, ()))
    }

    def draw(axes: Axes) -> None:
        shades = [COLOURS[kind] for kind in heights]
        axes.stackplot(curve.positions, *heights.values(), labels=list(heights), colors=shades, linewidth=0)
        axes.axvline(peak.position, color=INK, linewidth=1, linestyle=":")
        top = peak.total / 1e6
        axes.set(xlim=(0, max(curve.length - 1, 1)), ylim=(0, 1.12 * top), ylabel="in use (MB)")
        side = "left" if peak.position < curve.length / 2 else "right"
        axes.text(peak.position, 1.05 * top, f" {human_bytes(peak.total)} ", ha=side, va="center")
        axes.set_xlabel("operation of the step, in order")
        if len(curve.marks) <= MANY_PHASES:
            places = [*(position for position, _ in curve.marks), curve.length]
            has_room = [end - begin >= curve.length / 8 for begin, end in itertools.pairwise(places)]
            names = [phase if room else "" for (_, phase), room in zip(curve.marks, has_room, strict=True)]
            axes.set_xticks(places[:-1], names, ha="left")
            for place in places[1:-1]:
                axes.axvline(place, color=INK, linewidth=0.6, alpha=0.5)

    return Figure(title=title, caption=caption, draw=draw)
