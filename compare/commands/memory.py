"""`shardpair memory`: what a device holds at the peak of a step, by class, in every engine and layout."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from compare.contract.memory_profile import CLASSES, MEANINGS, Curve, Peak
from compare.contract.record import ON_HOST, Record
from compare.flags import PresetNames, StudiedName, chosen_engines
from compare.judge.outcome import Case, Grid, Outcome
from compare.run.study import OF_LAYOUTS, Study
from compare.setup.grid import grid, pivot, vary
from compare.setup.presets import PRESETS, check_names
from compare.show.figures import COLOURS, INK, Axes, Figure
from compare.show.findings import NONE, Column, Findings, Row, Table, Text, findings_of, table_of
from compare.spec.experiment import Experiment
from compare.text import human_bytes
from compare.theory.memory import KINDS, bytes_at_rest
from compare.theory.peak import peak_per_device

MANY_PHASES = 12
"""Largest number of phases whose names fit into a figure."""
LAYOUTS = (
    *("single", "ddp", "zero1", "zero2", "fsdp", "shard_grad_op", "hsdp", "tp", "tp_sp"),
    *("ddp_tp", "fsdp_tp", "fsdp_tp_sp", "pp", "pp_gpipe"),
)


class Memory(Study, frozen=True, kw_only=True):
    """Train under several layouts, and show the memory of the fullest device at its peak, by class.

    The table also has the estimate. Each layout runs on 2 devices, or 4 if it has two axes.

    Try:
      shardpair memory demo --presets ddp fsdp tp
      shardpair memory demo --presets single --variants layout.remat=full train.loss_chunks=4
    """

    engines: tuple[StudiedName, ...] = ()
    """Engines to train; a layout skips engines that cannot express it. Default: all."""
    presets: PresetNames = LAYOUTS
    variants: tuple[str, ...] = ()
    """Settings that save memory, one more row each, such as layout.remat=full."""

    fixed: ClassVar = {**OF_LAYOUTS, "init_from": None, "train.max_iters": 3}

    def cases(self, experiment: Experiment) -> Grid:
        """Each layout and setting on every engine that can express it, on 2 devices, or 4 with two axes."""
        check_names("--presets", "preset", self.presets, PRESETS)
        layouts = {name: (name, 2 * PRESETS[name].fixed) for name in self.presets}
        rows, refused = vary(experiment, layouts, self.variants)
        cases, left_out = grid(chosen_engines(self.engines), rows)
        return cases, left_out | refused

    def keep(self, case: Case, record: Record, *, first_step_after_s: float) -> Peak:
        """The peak of the fullest device; no bytes if the engine recorded none."""
        memory = record.memory
        return memory.devices[memory.fullest].peak if memory and memory.devices else Peak(bytes={})

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """Sums of all classes, a row for each layout; and a table of classes with the estimate."""
        peaks = {name: peak for name, peak in outcome.values(Peak).items() if peak.bytes}

        def total(name: str) -> Text:
            return Text(human_bytes(peaks[name].total) if name in peaks else NONE)

        def estimated(name: str) -> float:
            case = outcome.cases[name]
            return max(peak_per_device(case.engine, case.experiment))

        columns: list[Column[str]] = [
            Column("layout", lambda name: outcome.cases[name].row),
            Column("engine", lambda name: outcome.cases[name].engine),
            *(
                Column(kind, lambda name, kind=kind: peaks[name].bytes.get(kind) or None, human_bytes)
                for kind in CLASSES
            ),
            Column("all", lambda name: peaks[name].total, human_bytes),
            Column("estimated", estimated, human_bytes),
        ]
        return findings_of(
            outcome,
            title=f"Peak memory of a device: {outcome.name}",
            sentence=f"{len(peaks)} peaks",
            tables=[
                pivot("Bytes of the fullest device at its peak", outcome, total),
                table_of("By class", columns, list(peaks), words=1),
            ],
            values={"rows": peaks},
        )


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


def memory_tables(records: Mapping[str, Record]) -> list[Table]:
    """Bytes of the fullest device between two steps; and at the peak, for cases that recorded it."""
    profiles = {name: one.memory for name, one in records.items() if one.memory and one.memory.devices}
    if not profiles:
        return [resting_table(records)]
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
    outside = [profile.devices[profile.fullest].outside_allocator for profile in profiles.values()]
    if any(outside):
        cells = [Text(human_bytes(size) if size else NONE) for size in outside]
        what = "CUDA's context, NCCL's communicators, and other processes on the GPU"
        rows.append(Row(Text("outside of the allocator", what), cells))
    rows.append(Row(Text("where"), [Text(peak.phase or NONE, place_of(peak)) for peak in peaks.values()]))
    at_peak = Table(
        name="Memory at the peak of a step",
        corner="class, of the fullest device",
        columns=list(peaks),
        rows=rows,
    )
    return [resting_table(records), at_peak]


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
