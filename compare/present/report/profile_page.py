"""Fill the page of a profile: a picture for each engine, the table, and every device's figures."""

from collections.abc import Mapping
from pathlib import Path

from compare.contract.record import Record
from compare.host.disk import write_atomically
from compare.judge.profile import PROFILE, DeviceTime, EngineProfile, Profile
from compare.present.profile_tables import notes, rows, title
from compare.present.report.lanes import measured_steps
from compare.present.report.pictures import timelines
from compare.present.report.tables import Row, Table, Text
from compare.present.report.template import render_page

PAGE = "profile.html"
COLUMNS = {
    "forward_ms": "forward",
    "backward_ms": "backward",
    "update_ms": "update",
    "communication_ms": "communication",
    "exposed_ms": "of it exposed",
    "idle_ms": "idle",
}


def write_profile_page(profile: Profile, records: Mapping[str, Record], folder: Path) -> Path:
    """Write `folder/profile.html`: one file, nothing fetched, light and dark. Returns its path."""
    made = f"{profile.created_utc[:16].replace('T', ' ')} UTC"
    page = render_page(
        "study.html",
        title=f"{profile.name}: {title(profile)[0].lower()}{title(profile)[1:]}",
        sentence=profile.verdict,
        state="" if profile.passed else "fail",
        about=[f"{profile.machine}, {profile.device_kind}. {made}."],
        warnings=[],
        pictures=[*measured_steps(list(records), list(records.values())), *timelines(list(records.values()))],
        tables=[_figures(profile), *(_devices(engine) for engine in profile.engines if engine.devices)],
        notes=notes(profile),
        command="",
        result=profile,
        data=PROFILE,
    )
    write_atomically(folder / PAGE, page.encode())
    return folder / PAGE


def _figures(profile: Profile) -> Table:
    return Table(
        name="Where the time of a step goes",
        corner="mean over devices",
        columns=[engine.name for engine in profile.engines],
        rows=[Row(Text(label), [Text(cell) for cell in cells]) for label, cells in rows(profile)],
    )


def _devices(engine: EngineProfile) -> Table:
    return Table(
        name=f"{engine.name}: every device of step {engine.step} (ms)",
        corner="device",
        columns=list(COLUMNS.values()),
        rows=[_row(device) for device in engine.devices],
    )


def _row(device: DeviceTime) -> Row:
    cells = [Text(f"{getattr(device, field):.2f}") for field in COLUMNS]
    return Row(Text(f"device {device.device}"), cells)
