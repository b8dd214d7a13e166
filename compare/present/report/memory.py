"""Bytes that a case's devices hold between two steps and at the peak of one, beside the closed forms."""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from compare.contract.memory_profile import CLASSES, MEANINGS, Class
from compare.contract.record import ON_HOST, Record
from compare.judge.closed_forms.memory import KINDS, closed_form
from compare.present.memory_tables import UNEXPLAINED, AtPeak
from compare.present.report.tables import Row, Table, Text, upright
from compare.terminal import human_bytes


class AtRest(Struct, frozen=True, kw_only=True):
    """Bytes at rest of one case by kind, measured and expected, for each device in the order of the mesh."""

    measured: dict[str, list[int]]
    closed_form: dict[str, list[float]]

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.measured[KINDS[0]])

    @property
    def device(self) -> int:
        """The fullest device."""
        return max(range(self.devices), key=lambda device: sum(self.measured[kind][device] for kind in KINDS))

    @property
    def fullest(self) -> dict[str, int]:
        """Bytes of the fullest device, by kind."""
        return {kind: self.measured[kind][self.device] for kind in KINDS}

    @property
    def on_host(self) -> int:
        """Bytes of the fullest device's state that are in the host's memory."""
        return self.measured.get(ON_HOST, [0] * self.devices)[self.device]

    @property
    def expected(self) -> dict[str, float]:
        """Bytes that the fullest device should hold, by kind."""
        return {kind: self.closed_form[kind][self.device] for kind in KINDS}


def at_rest(record: Record) -> AtRest | None:
    """Bytes at rest as a record says; None if it says nothing."""
    manifest = record.manifest
    if not manifest.resident_bytes:
        return None
    expected = closed_form(manifest.engine, manifest.experiment)
    return AtRest(measured=manifest.resident_bytes, closed_form=expected)


def memory_table(names: list[str], held: Sequence[AtRest | None]) -> Table:
    """Bytes at rest of the fullest device, by kind, each beside its closed form."""
    rows = [Row(Text(kind), [_kind_cell(one, [kind]) for one in held]) for kind in KINDS]
    rows.append(Row(Text("all"), [_kind_cell(one, KINDS) for one in held], is_total=True))
    if any(one.on_host for one in held if one):
        rows.append(Row(Text("in the host's memory"), [_host_cell(one) for one in held]))
    return upright(Table(name="Memory at rest, by kind", corner="fullest device", columns=names, rows=rows))


def peak_table(names: list[str], peaks: Sequence[AtPeak | None]) -> Table:
    """The fullest device's bytes at the peak of the watched step, by class, each beside its closed form."""
    shown = [kind for kind in CLASSES if any(kind in one.sizes for one in peaks if one)]
    rows = [Row(Text(kind, MEANINGS[kind]), [_class_cell(one, kind) for one in peaks]) for kind in shown]
    totals = [Text(human_bytes(one.peak.total)) if one else Text("not recorded") for one in peaks]
    rows.append(Row(Text("all"), totals, is_total=True))
    rows.append(Row(Text("where"), [Text(one.peak.phase, one.where) if one else Text("") for one in peaks]))
    return upright(Table(name="Memory at the peak, by class", corner="class", columns=names, rows=rows))


def _class_cell(one: AtPeak | None, kind: Class) -> Text:
    if one is None:
        return Text("not recorded")
    measured, expected = one.sizes.get(kind, (0, None))
    if expected is None:
        return Text(human_bytes(measured))
    cell = _beside(measured, expected)
    return (
        cell if one.is_explained(kind) else msgspec.structs.replace(cell, note=f"{cell.note}: {UNEXPLAINED}")
    )


def _kind_cell(held: AtRest | None, kinds: Sequence[str]) -> Text:
    if held is None:
        return Text("not recorded")
    return _beside(sum(held.fullest[kind] for kind in kinds), sum(held.expected[kind] for kind in kinds))


def _host_cell(held: AtRest | None) -> Text:
    return Text("not recorded") if held is None else Text(human_bytes(held.on_host))


def _beside(measured: float, expected: float) -> Text:
    off = f", {measured / expected - 1:+.1%}" if expected and round(measured / expected - 1, 3) else ""
    return Text(human_bytes(measured), f"of {human_bytes(expected)}{off}")


def device_table(name: str, held: AtRest, axes: dict[str, int]) -> Table:
    """Every device's bytes at rest, by kind, each beside its closed form.

    Args:
        name: of the case.
        held: its bytes.
        axes: the mesh: degree by axis name, outermost first.
    """
    rows = []
    for device in range(held.devices):
        cells = [_beside(held.measured[kind][device], held.closed_form[kind][device]) for kind in KINDS]
        whole = (
            sum(by_kind[kind][device] for kind in KINDS) for by_kind in (held.measured, held.closed_form)
        )
        rows.append(Row(Text(str(device), _coordinates(device, axes)), [*cells, _beside(*whole)]))
    return Table(name=f"{name}: every device", corner="device", columns=[*KINDS, "all"], rows=rows)


def _coordinates(device: int, axes: dict[str, int]) -> str:
    """Position of a device in the mesh: `pp 1, tp 0`."""
    words = []
    for axis, degree in reversed(axes.items()):
        device, place = divmod(device, degree)
        if degree > 1:
            words.append(f"{axis} {place}")
    return ", ".join(reversed(words))
