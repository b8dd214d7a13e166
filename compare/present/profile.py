"""What a profile says: where the time of a step goes, engine by engine and device by device."""

from collections.abc import Callable, Mapping

import msgspec
from msgspec import UNSET, UnsetType

from compare.contract.record import Record
from compare.judge.outcome import Outcome
from compare.judge.profile import DeviceTime, EngineProfile, Profile
from compare.show.findings import NONE, Column, Picture, Row, Table, Text
from compare.terminal import layout_in_words

ROWS: dict[str, Callable[[EngineProfile], float | UnsetType]] = {
    "step, unwatched (ms)": lambda engine: engine.step_ms,
    "step, watched (ms)": lambda engine: engine.watched_ms,
    "timeline's wall (ms)": lambda engine: engine.wall_ms,
    "forward (ms)": lambda engine: engine.mean_ms("forward_ms"),
    "backward (ms)": lambda engine: engine.mean_ms("backward_ms"),
    "update (ms)": lambda engine: engine.mean_ms("update_ms"),
    "communication (ms)": lambda engine: engine.mean_ms("communication_ms"),
    "of it exposed (ms)": lambda engine: engine.mean_ms("exposed_ms"),
    "idle (ms)": lambda engine: engine.mean_ms("idle_ms"),
}
SHARES: dict[str, Callable[[EngineProfile], float | UnsetType]] = {
    "cost of watching": lambda engine: engine.overhead,
    "bubble, measured": lambda engine: engine.bubble,
    "bubble of the schedule": lambda engine: engine.planned_bubble,
}
"""Rows that are a share; of pipelines the last two."""

DEVICE = (
    Column[DeviceTime]("device", lambda one: f"device {one.device}"),
    Column[DeviceTime]("forward", lambda one: one.forward_ms, ".2f"),
    Column[DeviceTime]("backward", lambda one: one.backward_ms, ".2f"),
    Column[DeviceTime]("update", lambda one: one.update_ms, ".2f"),
    Column[DeviceTime]("communication", lambda one: one.communication_ms, ".2f"),
    Column[DeviceTime]("of it exposed", lambda one: one.exposed_ms, ".2f"),
    Column[DeviceTime]("idle", lambda one: one.idle_ms, ".2f"),
)


def timelines(records: Mapping[str, Record]) -> list[Picture]:
    """The watched steps as they were measured, and pipelines as they were planned."""
    from compare.present.report.lanes import measured_steps
    from compare.present.report.pictures import timelines as planned

    every = list(records.values())
    found = [*measured_steps(list(records), every), *planned(every)]
    return [msgspec.structs.replace(picture, is_wide=True) for picture in found]


def figures_of(profile: Profile, name: str) -> Table:
    """A column for each engine; rows that nobody has a figure for are left out."""
    found = {label: [_ms(value(engine)) for engine in profile.engines] for label, value in ROWS.items()}
    found |= {label: [_share(value(engine)) for engine in profile.engines] for label, value in SHARES.items()}
    return Table(
        name=name,
        corner="mean over devices",
        columns=[engine.name for engine in profile.engines],
        rows=[
            Row(Text(label), [Text(cell) for cell in cells])
            for label, cells in found.items()
            if any(cell != NONE for cell in cells)
        ],
    )


def title(outcome: Outcome) -> str:
    """What was watched."""
    return f"One step, {layout_in_words(outcome.experiment, outcome.platform)}"


def notes(profile: Profile, platform: str) -> list[str]:
    """Sentences that say what the figures are, and what cannot be told."""
    lines = [
        "Exposed: communication with no compute beside it. Idle: neither. Communication that compute hides "
        "counts in both rows.",
    ]
    methods: dict[str, list[str]] = {}
    for engine in profile.engines:
        methods.setdefault(engine.method, []).append(engine.name)
    lines += [f"{', '.join(names)}: {method}" for method, names in methods.items()]
    if names := [engine.name for engine in profile.engines if (engine.overhead or 0.0) < 0]:
        lines.append(
            f"{', '.join(names)}: the watched step was shorter than the others: the machine was busy with "
            f"something else, and these times say little."
        )
    if platform == "cpu":
        lines.append("CPU timings: devices that share cores take them from each other.")
    return lines


def _ms(value: float | UnsetType) -> str:
    return NONE if value is UNSET else f"{value:.1f}"


def _share(value: float | UnsetType) -> str:
    return NONE if value is UNSET else f"{value:.0%}"
