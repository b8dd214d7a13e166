"""`shardpair profile`: where the time of one step goes, device by device."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from msgspec import Struct
from msgspec.structs import replace

from compare.commands.profile.figures import chrome_trace, timeline_figures
from compare.contract.record import Record
from compare.contract.timeline import PROFILED_STEP, bubble_fraction, busy_us, exposed_us, idle_us
from compare.execute.cpu_load import warn_of_load
from compare.judge.outcome import Case, Grid, Outcome, read_run
from compare.pipeline.schedules import make_schedule
from compare.pipeline.simulator import bubble_fraction as planned_fraction
from compare.run.metrics import steady_times_ms
from compare.run.spread import Spread
from compare.show.findings import Column, Findings, Link, Row, Table, Text, format_value, verdict_findings
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError, edited, revalidate
from compare.system.disk import write_atomically
from compare.text import layout_in_words

TRACE = "trace.json"
STEPS = 20
"""Default number of steps: some before the watched step, and more for the median."""
SHORTEST = PROFILED_STEP + 3
SHARED = "CPU timings: devices share the cores."
MOST_WATCHING = 0.25
"""Largest cost of watching, as a share of a step, without a warning."""
BUSY = ("forward", "backward", "update", "communication")


class Profile(Spread, frozen=True, kw_only=True):
    """Watch one step of each engine: forward, backward, update and communication of every device.

    One step of a short run is watched. The median of the other steps is the step's time. The table has
    the cost of watching. Each engine's folder gets a trace.json for Perfetto.

    Try:
      shardpair profile demo --preset fsdp --devices 2
      shardpair profile demo --preset pp --devices 2 --engines torch-manual torch-library
    """

    fixed: ClassVar = {"init_from": None, "train.eval_interval": 0, "checkpoint.every": 0}
    keeps_records = True

    def resolve(self) -> Experiment:
        """The experiment under its layout, with as many steps as a profile needs. Raises ExperimentError."""
        experiment, steps = super().resolve(), self.train.max_iters
        if "train.max_iters" not in self.given:
            steps = min(steps, STEPS)
        if steps < SHORTEST:
            raise ExperimentError(
                f"--train.max_iters {steps} is too short for a profile: give {SHORTEST} steps or more"
            )
        return revalidate(edited(experiment, {"train": {"max_iters": steps}}))

    def cases(self, experiment: Experiment) -> Grid:
        """Every engine that can express the layout."""
        for name in self.engines:
            if ENGINES[name].is_peer:
                raise ExperimentError(f"profile: {name} leaves no timeline: leave it out of --engines")
        return self.against_first(experiment, profile=True)

    def keep(self, case: Case, record: Record, *, first_step_after_s: float) -> Any:
        """The figures of a case. Writes its trace into the folder of its record."""
        if record.timeline:
            trace = chrome_trace(case.engine, record.timeline, process=list(ENGINES).index(case.engine))
            write_atomically(record.folder / TRACE, trace)
        return super().keep(case, record, first_step_after_s=first_step_after_s)

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """The table of all engines, every device's figures, and the measured and planned timelines."""
        records = read_run(folder)[1]
        engines = [profile_of(name, record) for name, record in records.items()]
        watched = [engine for engine in engines if engine.devices]
        without = ", ".join(engine.name for engine in engines if not engine.devices)
        verdict = (f"INCOMPLETE: {without} left no timeline; " if without else "") + outcome.sentence()
        waits = [
            f"{one.name} waits {one.mean_ms('exposed'):.1f} of {one.wall_ms:.1f} ms for communication"
            for one in watched
        ]
        warnings = [*warn_of_load(outcome), *warn_of_watching(engines)]
        words = f"one step, {layout_in_words(outcome.experiment, outcome.platform)}"
        return verdict_findings(
            outcome,
            title=f"{outcome.name}: {words}",
            sentence="; ".join([verdict, *(["its times are UNRELIABLE"] if warnings else waits)]),
            is_doubtful=bool(warnings),
            warnings=warnings,
            passed=outcome.passed and not without,
            tables=[engine_table(engines, f"O{words[1:]}")],
            notes=[
                "Exposed: communication without compute at the same time. Idle: neither. Overlapped "
                "communication counts in both rows.",
                *([SHARED] if outcome.platform == "cpu" else []),
                f"The folder of each engine has a {TRACE} for Perfetto.",
            ],
            links=[Link(f"trace of {one.name}", href=f"{one.name}/{TRACE}") for one in watched],
            figures=timeline_figures(records),
            values={"engines": engines},
        )


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

    @property
    def cost_of_watching(self) -> float | None:
        """Share by which the watched step is longer than the others; None without a timeline."""
        return self.watched_ms and self.watched_ms / self.step_ms - 1

    def mean_ms(self, kind: str) -> float | None:
        """The mean over the devices; None without a timeline."""
        return statistics.fmean(device[f"{kind}_ms"] for device in self.devices) if self.devices else None


def warn_of_watching(engines: Sequence[EngineProfile]) -> list[str]:
    """A warning if watching made a step of an engine longer by more than `MOST_WATCHING`."""
    costs = {
        engine.name: cost for engine in engines if (cost := engine.cost_of_watching or 0) > MOST_WATCHING
    }
    if not costs:
        return []
    words = ", ".join(f"of {name} by {cost:.0%}" for name, cost in costs.items())
    return [f"Watching made a step longer, {words}: other steps differ from these timelines."]


COLUMNS: tuple[Column[EngineProfile], ...] = (
    Column("step, unwatched (ms)", lambda engine: engine.step_ms, ".1f"),
    Column("step, watched (ms)", lambda engine: engine.watched_ms, ".1f"),
    Column("timeline's wall (ms)", lambda engine: engine.wall_ms, ".1f"),
    *(
        Column(f"{name} (ms)", lambda engine, name=name: engine.mean_ms(name), ".1f")
        for name in (*BUSY, "exposed", "idle")
    ),
    Column("cost of watching", lambda engine: engine.cost_of_watching, ".0%"),
    Column("bubble, measured", lambda engine: engine.bubble, ".0%"),
    Column("bubble of the schedule", lambda engine: engine.planned_bubble, ".0%"),
)
"""Rows of the table; the last two are for pipelines."""


def engine_table(engines: list[EngineProfile], name: str) -> Table:
    """A column for each engine, without rows that have no figure."""
    values = {column: [column.of(engine) for engine in engines] for column in COLUMNS}
    return Table(
        name=name,
        corner="mean over devices",
        columns=[engine.name for engine in engines],
        rows=[
            Row(Text(column.name), [Text(format_value(value, column.form)) for value in row])
            for column, row in values.items()
            if any(value is not None for value in row)
        ],
    )


def profile_of(name: str, record: Record) -> EngineProfile:
    """The figures of a case, from its steps, its pipeline schedule and its timeline."""
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
