"""What a device holds between two steps and at the peak of one, by class, beside the closed forms."""

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from compare.contract.memory_profile import CLASSES, MEANINGS, Class, Curve, Peak
from compare.contract.record import ON_HOST, Record
from compare.judge.closed_forms.memory import KINDS, closed_form
from compare.judge.closed_forms.peak_memory import PeakForm, peak_form
from compare.show.figures import INK, Figure, areas
from compare.show.findings import NONE, Row, Table, Text
from compare.terminal import human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UNEXPLAINED = "unexplained"
"""Beside a figure that differs from its closed form, for no reason that is known."""
NARROWEST = 0.1
"""Of a step: what a phase takes whose name has room below it."""
MANY_PHASES = 12
"""Changes from which on a pipeline's forwards and backwards are too close to be named."""


class AtPeak(Struct, frozen=True, kw_only=True):
    """A device at its peak, as it was measured and as it should be."""

    device: int
    peak: Peak
    form: PeakForm | None
    """None where there is none: `peak_form` says for what."""

    @property
    def sizes(self) -> dict[str, tuple[int, float | None]]:
        """Of every class that is there, or should be: bytes measured, and by the closed form."""
        expected = self.form.bytes if self.form else {}
        return {
            kind: (self.peak.bytes.get(kind, 0), expected.get(kind))
            for kind in CLASSES
            if self.peak.bytes.get(kind) or expected.get(kind)
        }

    @property
    def where(self) -> str:
        """The operation at which the peak is, and its place; "" of a plan."""
        return where(self.peak)

    def is_explained(self, kind: Class) -> bool:
        """True if a class is as its closed form has it, or has none."""
        return self.form is None or self.form.fits(kind, self.peak.bytes.get(kind, 0))


def where(peak: Peak) -> str:
    """The operation at which a peak is, and its place; "" of a plan."""
    return peak.operation + (f" in {peak.place}" if peak.place else "")


def at_peak(record: Record, *, device: int | None = None) -> AtPeak | None:
    """One device at its peak, by default the fullest; None if the record has no profile."""
    profile = record.memory
    if profile is None or not profile.devices:
        return None
    chosen = profile.fullest if device is None else device
    return AtPeak(
        device=chosen,
        peak=profile.of(chosen).peak,
        form=peak_form(record.manifest.engine, record.manifest.experiment, device=chosen),
    )


def _beside(measured: float, expected: float | None, *, is_explained: bool = True) -> Text:
    """Bytes, and how far they are off the closed form: `12 MB`, `of 11.8 MB, +1.7%`."""
    if expected is None:
        return Text(human_bytes(measured))
    off = round(measured / expected - 1, 3) if expected else 0.0
    note = f"of {human_bytes(expected)}{f', {off:+.1%}' if off else ''}"
    return Text(human_bytes(measured), note if is_explained else f"{note}: {UNEXPLAINED}")


def rows(cases: Sequence[tuple[str, AtPeak]], *, kinds: Sequence[Class] = CLASSES) -> list[list[str]]:
    """A row for each case: its name, each class beside its closed form, and all together."""
    found = []
    for name, one in cases:
        texts = [_class_cell(one, kind) if kind in one.sizes else Text("") for kind in kinds]
        cells = [f"{text.text} {text.note}".strip() for text in texts]
        found.append([name, *cells, human_bytes(one.peak.total)])
    return found


def resting_table(records: Mapping[str, Record]) -> Table:
    """What the fullest device of each case keeps between two steps, by kind."""
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
    """Each kind, all of them, and what offload put into the host's memory."""
    manifest = record.manifest
    measured, expected = manifest.resident_bytes, closed_form(manifest.engine, manifest.experiment)
    if not measured:
        return [Text("not recorded")] * (len(KINDS) + 1)
    device = max(range(manifest.devices), key=lambda d: sum(measured[kind][d] for kind in KINDS))
    pairs = [(measured[kind][device], expected[kind][device]) for kind in KINDS]
    pairs.append((sum(one for one, _ in pairs), sum(form for _, form in pairs)))
    on_host = measured.get(ON_HOST, [0] * manifest.devices)[device]
    return [*(_beside(*pair) for pair in pairs), *([Text(human_bytes(on_host))] if on_host else [])]


def peak_table(peaks: Mapping[str, AtPeak | None], *, below: str = "") -> Table:
    """The fullest device's bytes at the peak of the watched step, by class, each beside its closed form."""
    classes = [kind for kind in CLASSES if any(one and kind in one.sizes for one in peaks.values())]
    found = [
        Row(Text(kind, MEANINGS[kind]), [_class_cell(one, kind) for one in peaks.values()])
        for kind in classes
    ]
    totals = [Text(human_bytes(one.peak.total) if one else "not recorded") for one in peaks.values()]
    places = [Text(one.peak.phase, one.where) if one else Text("not recorded") for one in peaks.values()]
    return Table(
        name="Memory at the peak of a step",
        corner="class",
        columns=list(peaks),
        rows=[*found, Row(Text("all"), totals, is_total=True), Row(Text("where"), places)],
        below=below,
    )


def _class_cell(one: AtPeak | None, kind: Class) -> Text:
    if one is None:
        return Text("not recorded")
    if kind not in one.sizes:
        return Text(NONE)
    return _beside(*one.sizes[kind], is_explained=one.is_explained(kind))


def peak_words(peaks: Mapping[str, AtPeak | None]) -> str:
    """Which moment the closed forms are of, and which cases have none."""
    forms = {name: one.form for name, one in peaks.items() if one}
    moments = " or ".join(dict.fromkeys(f.moment for f in forms.values() if f and not f.is_of_state))
    state = [name for name, form in forms.items() if form and form.is_of_state]
    without = [name for name, form in forms.items() if not form]
    words = [f"The closed forms are those {moments}."] if moments else []
    words += [f"Of {', '.join(state)} there is one of parameters and optimizer alone."] if state else []
    words += [f"There is none for {', '.join(without)}."] if without else []
    return " ".join(words)


def memory_figures(records: Mapping[str, Record]) -> list[Figure]:
    """Memory over the watched step of each case that has a curve of it, of its fullest device."""
    figures = []
    for name, record in records.items():
        profile = record.memory
        if profile and profile.devices and (curve := profile.devices[profile.fullest].curve):
            peak = profile.devices[profile.fullest].peak
            which = f"Device {profile.fullest}" if len(profile.devices) > 1 else "Every device"
            caption = f"{which}; the dotted line is the peak, in {peak.phase}: {where(peak)}."
            method = f"{profile.method[:1].upper()}{profile.method[1:]}."
            title = f"Memory of {name} over a step"
            figures.append(memory_figure(title, curve, peak, caption=f"{caption} {method}"))
    return figures


def memory_figure(title: str, curve: Curve, peak: Peak, *, caption: str) -> Figure:
    """One device's memory over a step: an area for each class, and a line where the peak is."""
    factor, unit = next(
        ((size, unit) for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if peak.total >= size),
        (1.0, "B"),
    )
    heights: dict[str, list[float]] = {
        kind: [size / factor for size in curve.bytes[kind]]
        for kind in CLASSES
        if any(curve.bytes.get(kind, ()))
    }

    def draw(axes: "Axes") -> None:
        areas(axes, curve.positions, heights)
        axes.axvline(peak.position, color=INK, linewidth=1, linestyle=":")
        top = peak.total / factor
        axes.set(xlim=(0, max(curve.length - 1, 1)), ylim=(0, 1.12 * top), ylabel=f"in use ({unit})")
        side = "left" if peak.position < curve.length / 2 else "right"
        axes.text(peak.position, 1.05 * top, f" {top:.3g} {unit} ", ha=side, va="center")
        axes.set_xlabel("operation of the step, in order")
        if len(curve.marks) <= MANY_PHASES:
            ends = [mark.position for mark in curve.marks[1:]] + [curve.length]
            named = {
                (mark.position + end) / 2: mark.phase
                for mark, end in zip(curve.marks, ends, strict=True)
                if end - mark.position >= NARROWEST * curve.length
            }
            for mark in curve.marks[1:]:
                axes.axvline(mark.position, color=INK, linewidth=0.6, alpha=0.5)
            axes.set_xticks(list(named), list(named.values()))
            axes.tick_params(axis="x", length=0)

    return Figure(title=title, caption=caption, draw=draw)
