"""`shardpair profile`: where the time of one step goes, device by device."""

from pathlib import Path
from typing import ClassVar

import msgspec

from compare.contract.record import read_record
from compare.contract.timeline import PROFILED_STEP
from compare.flags.chosen_layout import Spread
from compare.host.disk import write_atomically
from compare.host.json_files import write_json
from compare.judge.comparison import Comparison, read_comparison
from compare.judge.profile import PROFILE, profile_of
from compare.paired_study import Cases, PairedStudy, paired_findings
from compare.present.chrome_trace import chrome_trace
from compare.present.profile import DEVICE, figures_of, notes, timelines, title
from compare.show.findings import Findings, table_of
from compare.show.page import write_page
from compare.show.pages import leave_page
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError, edited, revalidate
from compare.studies.cases import Settings, engine_cases

PAGE, TRACE = "profile.html", "trace.json"
STEPS = 20
"""Of a run, unless the user says otherwise: some before the one that is watched, and more for the median."""
SHORTEST = PROFILED_STEP + 3


class Profile(Spread, PairedStudy, frozen=True, kw_only=True):
    """Watch one step of each engine: forward, backward, update and communication of every device.

    One step of a short run is watched. The others are not: their median is the step's time, beside which the
    cost of watching is said. For each engine a trace.json is written, which Perfetto opens.

    Try:
      shardpair profile demo --preset fsdp --devices 2
      shardpair profile demo --preset pp --devices 2 --engines torch-manual torch-library
      shardpair profile cpu --preset ddp --devices 2 --layout.bucket_mb 0.5
      shardpair profile --results runs/profile-demo-20260101-120000
    """

    results: str = ""
    """Show a finished profile again, from its folder; nothing is run."""

    brief = "where the time of one step goes, device by device"
    group = "Measure"
    own_weights = "the time of a step does not depend on the weights"
    leaves_report = True
    needs_first = False
    alters_nothing: ClassVar = frozenset({"picture", "results"})

    @property
    def gives_layouts(self) -> bool:
        """True if a preset replaces the experiment's layout."""
        return bool(self.preset)

    def run_settings(self) -> Settings:
        """With the timeline of one step."""
        return msgspec.structs.replace(self.settings(), ladder=False, profile=True)

    def asked(self) -> Experiment:
        """The experiment under its layout, with as many steps as a profile needs."""
        steps = self.train.max_iters
        was_said = "train.max_iters" in self.given
        return short_run(self.laid_out(super().asked()), steps=steps if was_said else min(steps, STEPS))

    def cases(self, experiment: Experiment) -> Cases:
        """Every engine that can express the layout."""
        engines, left_out = self.fitting(experiment)
        for name in engines:
            ENGINES[name].require_watchable(profile=True)
        return engine_cases(experiment, engines), left_out

    def outcome(self, default: Experiment) -> tuple[Comparison, Path]:
        """Run every engine with one of its steps watched; or read what was run."""
        if self.results:
            self._require_nothing_to_run(default)
            folder = Path(self.results)
            return read_comparison(folder)[0], folder
        return super().outcome(default)

    def _require_nothing_to_run(self, default: Experiment) -> None:
        """Refuse what --results would ignore. Raises ExperimentError."""
        given = {
            "run_dir": self.run_dir,
            "continue": self.continue_,
            "init_from": self.init_from,
            "engines": self.engines,
            "preset": self.preset,
            "devices": self.devices,
            "dry_run": self.dry_run,
        }
        others = [f"--{name}" for name, value in given.items() if value] + self.overrides(default)
        if others:
            raise ExperimentError(
                f"--results {self.results} shows what was run there: leave out {', '.join(others)}"
            )

    @classmethod
    def shown(cls, outcome: Comparison, folder: Path, *, picture: Path | None, as_json: bool) -> int:
        """Print it, and leave its page, the report, and a trace for each engine."""
        found = cls.findings(outcome, folder)
        write_json(folder / PROFILE, found.value)
        for process, name in enumerate(outcome.cases):
            if timeline := read_record(folder / name).timeline:
                write_atomically(folder / name / TRACE, chrome_trace(name, timeline, process=process))
        code = super().shown(outcome, folder, picture=picture, as_json=as_json)
        leave_page(lambda: write_page(folder / PAGE, found), label="page", as_json=as_json)
        return code

    @classmethod
    def findings(cls, outcome: Comparison, folder: Path) -> Findings:
        """The table of all engines, every device's figures, and the measured and planned timelines."""
        records = {name: read_record(folder / name) for name in outcome.cases}
        found = profile_of(outcome, records)
        watched = [engine for engine in found.engines if engine.devices]
        created, what = outcome.circumstances.created_utc[:16].replace("T", " "), title(found)
        return paired_findings(
            outcome,
            title=f"{outcome.name}: {what[0].lower()}{what[1:]}",
            sentence=found.verdict,
            value=found,
            passed=found.passed,
            about=[f"{outcome.circumstances.machine.system}, {outcome.device_kind}. {created} UTC."],
            tables=[figures_of(found)],
            details=[
                table_of(f"{engine.name}: every device of step {engine.step} (ms)", DEVICE, engine.devices)
                for engine in watched
            ],
            drawn=lambda: timelines(records),
            notes=[
                *notes(found),
                *(f"trace for Perfetto: {folder / engine.name / TRACE}" for engine in watched),
            ],
            left_out=outcome.left_out,
        )


def short_run(experiment: Experiment, *, steps: int) -> Experiment:
    """The experiment for a profile: so many steps, without evaluations and checkpoints between them.

    Raises:
        ExperimentError: too few steps to have some beside the one that is watched.
    """
    if steps < SHORTEST:
        raise ExperimentError(
            f"--train.max_iters {steps} is too short for a profile: give {SHORTEST} steps or more, of which "
            f"one is watched and the first do not count"
        )
    fields = {"train": {"max_iters": steps, "eval_interval": 0}, "checkpoint": {"every": 0}}
    return revalidate(edited(experiment, fields))
