"""`shardpair profile`: where the time of one step goes, device by device."""

from pathlib import Path
from typing import Any, ClassVar

import msgspec

from compare.commands.profile.table import chrome_trace, engine_table, measured_figures, planned_figures
from compare.commands.profile.timelines import profile_of
from compare.contract.record import Record
from compare.contract.timeline import PROFILED_STEP
from compare.judge.outcome import Case, Grid, Outcome, read_run
from compare.run.spread import Spread
from compare.setup.grid import beside_first
from compare.show.findings import Findings, verdict_findings
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError, edited, revalidate
from compare.system.disk import write_atomically
from compare.terminal import layout_in_words

TRACE = "trace.json"
STEPS = 20
"""Default number of steps: some before the watched step, and more for the median."""
SHORTEST = PROFILED_STEP + 3
SHARED = "CPU timings: devices share the cores."


class Profile(Spread, frozen=True, kw_only=True):
    """Watch one step of each engine: forward, backward, update and communication of every device.

    One step of a short run is watched. The median of the other steps is the step's time. The table has
    the cost of watching. Each engine's folder gets a trace.json for Perfetto.

    Try:
      shardpair profile demo --preset fsdp --devices 2
      shardpair profile demo --preset pp --devices 2 --engines torch-manual torch-library
    """

    brief = "where the time of one step goes, device by device"
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
        engines, left_out = self.fitting(experiment)
        for name in engines:
            if ENGINES[name].is_peer:
                raise ExperimentError(f"profile: {name} leaves no timeline: leave it out of --engines")
        return beside_first(engines, experiment, profile=True), left_out

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
        profile = profile_of(outcome, records)
        watched = [engine for engine in profile.engines if engine.devices]
        waits = [
            f"{one.name} waits {one.mean_ms('exposed'):.1f} of {one.wall_ms:.1f} ms for communication"
            for one in watched
        ]
        words = f"one step, {layout_in_words(outcome.experiment, outcome.platform)}"
        findings = verdict_findings(
            outcome,
            title=f"{outcome.name}: {words}",
            sentence="; ".join([profile.verdict, *waits]),
            passed=profile.passed,
            tables=[engine_table(profile, f"O{words[1:]}")],
            notes=[
                "Exposed: communication without compute at the same time. Idle: neither. Overlapped "
                "communication counts in both rows.",
                *([SHARED] if outcome.platform == "cpu" else []),
                *(f"trace for Perfetto: {folder / engine.name / TRACE}" for engine in watched),
            ],
        )
        figures = [*measured_figures(records), *planned_figures(records.values())]
        return msgspec.structs.replace(findings, value=profile, figures=figures)
