"""`shardpair profile`: where the time of one step goes, device by device."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from compare.commands.chosen_layout import Spread
from compare.commands.pages import leave_page
from compare.contract.record import Record
from compare.execute.progress import Reporter
from compare.host.disk import write_atomically
from compare.judge.comparison import Comparison, read_comparison
from compare.judge.profile import profile_of, save
from compare.present.chrome_trace import chrome_trace
from compare.present.profile import PAGE, findings_of_profile
from compare.present.report.render import write_report
from compare.show.page import show as show_findings
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError
from compare.studies.cases import Case, Settings, engine_cases
from compare.studies.profile import STEPS, read_twins, run_twins, short_run

TRACE = "trace.json"


class Profile(Spread, frozen=True, kw_only=True):
    """Watch one step of each engine: forward, backward, update and communication of every device.

    One step of a short run is watched. The others are not: their median is the step's time, beside which the
    cost of watching is said. torch's engines run once more without communicating, each as a silent twin: what
    the step takes beyond its twin's is communication that compute does not hide. For each engine a trace.json
    is written, which Perfetto opens.

    Try:
      shardpair profile demo --preset fsdp --devices 2
      shardpair profile demo --preset pp --devices 2 --engines torch-manual torch-library
      shardpair profile cpu --preset ddp --devices 2 --layout.bucket_mb 0.5 --no_twin
      shardpair profile --results runs/profile-demo-20260101-120000
    """

    twin: bool = True
    """Run torch's engines once more without communication; --no_twin leaves that out."""
    results: str = ""
    """Show a finished profile again, from its folder; nothing is run."""

    def __call__(self, default: Experiment) -> int:
        """Run it. Returns 0 if every engine finished, agreed and left a timeline, else 1."""
        if self.results:
            self._require_nothing_to_run(default)
            return show(Path(self.results), as_json=self.json)
        if self.dry_run:
            return self.show_plan(*self._planned(default))
        comparison, folder = self._watched(default)
        if self.twin:
            run_twins(comparison, folder, settings=self.settings(), reporter=Reporter(quiet=self.quiet))
        return show(folder, as_json=self.json)

    def _planned(self, default: Experiment) -> tuple[Experiment, list[Case], dict[str, str]]:
        """The experiment under its layout, its cases, and the engines that are none."""
        self.refuse_init_from("the time of a step does not depend on the weights")
        experiment = self.laid_out(self.resolved(is_spread=not self.preset))
        self.require_nothing_else(default, engines=self.engines, preset=self.preset)
        steps = self.train.max_iters
        asked = "train.max_iters" in self.given
        short = short_run(experiment, steps=steps if asked else min(steps, STEPS))
        engines, left_out = self.fitting(short)
        for name in engines:
            ENGINES[name].require_watchable(profile=True, silent=False)
        return short, engine_cases(short, engines), left_out

    def _watched(self, default: Experiment) -> tuple[Comparison, Path]:
        """Run every engine with one of its steps watched."""
        experiment, cases, left_out = self._planned(default)
        settings: Settings = msgspec.structs.replace(self.settings(), ladder=False, profile=True)
        name = f"profile-{Path(self.experiment).stem}"
        return self.compare(name, experiment, cases, settings=settings, needs_first=False, left_out=left_out)

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
            "no_twin": not self.twin,
        }
        others = [f"--{name}" for name, value in given.items() if value] + self.overrides(default)
        if others:
            raise ExperimentError(
                f"--results {self.results} shows what was run there: leave out {', '.join(others)}"
            )


def show(folder: Path, *, as_json: bool) -> int:
    """Put a profile together from its records, write its files, and print it.

    Returns:
        0 if every engine finished, agreed and left a timeline, else 1.

    Raises:
        RecordError: the folder holds no comparison, or nothing has finished in it.
    """
    comparison, found = read_comparison(folder)
    records = dict(zip(comparison.cases, found, strict=True))
    result = profile_of(comparison, records, read_twins(comparison, folder))
    _write_traces(records)
    save(result, folder)
    leave_page(partial(write_report, folder), as_json=as_json)
    return show_findings(
        findings_of_profile(result, records, folder), folder, page=PAGE, picture=None, as_json=as_json
    )


def _write_traces(records: Mapping[str, Record]) -> None:
    for process, (name, record) in enumerate(records.items()):
        if record.timeline:
            trace = chrome_trace(name, record.timeline, process=process)
            write_atomically(record.folder / TRACE, trace)
