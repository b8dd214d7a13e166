"""A profile: where the time of one step goes, engine by engine."""

import statistics
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from compare.contract.record import Record
from compare.contract.timeline import bubble_fraction, busy_us, exposed_us, idle_us
from compare.judge.outcome import Outcome
from compare.pipeline.schedules import make_schedule
from compare.pipeline.simulator import bubble_fraction as planned_fraction
from compare.run.metrics import steady_times_ms

BUSY = ("forward", "backward", "update", "communication")


class EngineProfile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One engine's step; without a timeline, fields that follow from one are None."""

    name: str
    """Name of its case and its folder."""
    step_ms: float
    """Median of the steps that were not watched."""
    devices: list[dict[str, float]] = []
    """Number of each device, and milliseconds of the watched step by kind. `exposed_ms` is communication
    without compute at the same time, `idle_ms` neither."""
    step: int | None = None
    """Number of the watched step."""
    watched_ms: float | None = None
    """Time of the watched step by the engine's own clock."""
    wall_ms: float | None = None
    """Time of the watched step in the timeline, on the slowest device."""
    bubble: float | None = None
    """Measured share of a pipeline's time in which devices wait."""
    planned_bubble: float | None = None
    """Simulated share: a backward takes two forwards, and messages take no time."""
    method: str = "it left no timeline"

    def mean_ms(self, kind: str) -> float | None:
        """The mean over the devices; None without a timeline."""
        return statistics.fmean(device[f"{kind}_ms"] for device in self.devices) if self.devices else None


class Profile(Struct, frozen=True, kw_only=True):
    """Result of `shardpair profile`."""

    engines: list[EngineProfile]
    verdict: str
    passed: bool
    """Every engine finished, agreed and left a timeline."""


def profile_of(outcome: Outcome, records: Mapping[str, Record]) -> Profile:
    """Reduce the timelines of finished cases, by name, to figures."""
    engines = [_engine(name, record) for name, record in records.items()]
    without = [engine.name for engine in engines if not engine.devices]
    missing = f"INCOMPLETE: {', '.join(without)} left no timeline; " if without else ""
    passed = outcome.passed and not without
    return Profile(engines=engines, verdict=missing + outcome.sentence(), passed=passed)


def _engine(name: str, record: Record) -> EngineProfile:
    timeline, layout = record.timeline, record.manifest.experiment.layout
    profile = EngineProfile(name=name, step_ms=statistics.median(steady_times_ms(record)))
    if layout.pp > 1:
        sizes = {"microbatches": record.manifest.experiment.microbatches_per_step, "chunks": layout.chunks}
        schedule = make_schedule(layout.schedule, ranks=layout.pp, **sizes)
        profile = replace(profile, planned_bubble=planned_fraction(schedule))
    if timeline is None:
        return profile
    return replace(
        profile,
        devices=[
            {"device": lane.device}
            | {f"{kind}_ms": busy_us(lane, kind) / 1e3 for kind in BUSY}
            | {"exposed_ms": exposed_us(lane) / 1e3, "idle_ms": idle_us(lane, timeline.wall_us) / 1e3}
            for lane in timeline.lanes
        ],
        step=timeline.step,
        watched_ms=next((step.step_time_ms for step in record.steps if step.step == timeline.step), None),
        wall_ms=timeline.wall_us / 1e3,
        bubble=bubble_fraction(timeline) if layout.pp > 1 else None,
        method=timeline.method,
    )
