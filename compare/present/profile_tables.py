"""A profile on stdout: a column for each engine; the same rows for its page."""

from collections.abc import Callable
from pathlib import Path

from msgspec import UNSET, UnsetType
from rich.table import Table

from compare.judge.profile import EngineProfile, Profile
from compare.terminal.console import print_json, results_console
from compare.terminal.layout_words import layout_in_words

NONE = "-"
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
    "silent twin's step (ms)": lambda engine: engine.twin_ms,
    "exposed, by the twin (ms)": lambda engine: engine.exposed_by_twin_ms,
}
SHARES: dict[str, Callable[[EngineProfile], float | UnsetType]] = {
    "cost of watching": lambda engine: engine.overhead,
    "bubble, measured": lambda engine: engine.bubble,
    "bubble of the schedule": lambda engine: engine.planned_bubble,
}
"""Rows that are a share; of pipelines the last two."""


def print_profile(profile: Profile, folder: Path, *, as_json: bool) -> None:
    """Print what `profile` says: the table, what it cannot say, and where the traces are."""
    if as_json:
        print_json(profile)
        return
    console = results_console()
    table = Table(title=title(profile))
    table.add_column("mean over devices")
    for engine in profile.engines:
        table.add_column(engine.name, justify="right")
    for label, cells in rows(profile):
        table.add_row(label, *cells)
    console.print(table)
    for line in notes(profile):
        console.print(line, soft_wrap=True)
    console.print(
        profile.verdict, style="bold green" if profile.passed else "bold red", soft_wrap=True, markup=False
    )
    for engine in profile.engines:
        if engine.devices:
            console.print(f"trace for Perfetto: {folder / engine.name / 'trace.json'}", soft_wrap=True)


def title(profile: Profile) -> str:
    """What was watched."""
    return f"One step, {layout_in_words(profile.experiment, profile.platform)}"


def rows(profile: Profile) -> list[tuple[str, list[str]]]:
    """The table as texts: a row's label, and a cell for each engine. Rows that nobody has are left out."""
    made = [(label, [_ms(value(engine)) for engine in profile.engines]) for label, value in ROWS.items()] + [
        (label, [_share(value(engine)) for engine in profile.engines]) for label, value in SHARES.items()
    ]
    return [(label, cells) for label, cells in made if any(cell != NONE for cell in cells)]


def notes(profile: Profile) -> list[str]:
    """Sentences that say what the figures are, and what cannot be told."""
    lines = [
        "Exposed: communication with no compute beside it. Idle: neither. Communication that compute hides "
        "counts in both rows. By the twin: the step less the same step without communication, on the rank "
        "that takes longest; of a pipeline that is its bubble, too.",
    ]
    methods: dict[str, list[str]] = {}
    twins: dict[str, list[str]] = {}
    for engine in profile.engines:
        methods.setdefault(engine.method, []).append(engine.name)
        if engine.no_twin:
            twins.setdefault(engine.no_twin, []).append(engine.name)
    lines += [f"{', '.join(names)}: {method}" for method, names in methods.items()]
    lines += [f"{', '.join(names)}: no silent twin: {why}" for why, names in twins.items()]
    lines += [f"{name} did not finish: {why}" for name, why in profile.failures.items()]
    impossible = {
        "the silent twin took longer than the step": [e.exposed_by_twin_ms for e in profile.engines],
        "the watched step was shorter than the others": [e.overhead for e in profile.engines],
    }
    for what, values in impossible.items():
        if names := [e.name for e, value in zip(profile.engines, values, strict=True) if (value or 0.0) < 0]:
            lines.append(
                f"{', '.join(names)}: {what}: the machine was busy with something else, and these times say "
                f"little."
            )
    if profile.platform == "cpu":
        lines.append("CPU timings: devices that share cores take them from each other.")
    return lines


def _ms(value: float | UnsetType) -> str:
    return NONE if value is UNSET else f"{value:.1f}"


def _share(value: float | UnsetType) -> str:
    return NONE if value is UNSET else f"{value:.0%}"
