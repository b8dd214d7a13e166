"""`shardpair schedule`: draw any pipeline schedule, and say what it costs."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.table import Table

from compare.execute.paths import PICTURES, check_output
from compare.host.disk import write_atomically
from compare.pipeline.schedules import SCHEDULES, Schedule, make_schedule
from compare.pipeline.simulator import bubble_fraction, makespan, peak_in_flight, run
from compare.spec.experiment import Experiment, ExperimentError
from compare.studies.presets import check_names
from compare.terminal.console import print_json, results_console

CHUNKS = 2
MICROSECONDS = 1000  # of a Chrome trace for one forward


class ScheduleCost(Struct, frozen=True, kw_only=True):
    """Cost of a schedule, in forwards of one microbatch through one rank."""

    makespan: float
    waiting: float
    """The share of the ranks' time in which they wait."""
    activations_held: list[int]
    """The most at once, by rank."""


class Draw(Struct, frozen=True, kw_only=True):
    """Draw pipeline schedules as a picture and as a Chrome trace, with bubble, makespan and memory.

    A backward takes twice a forward. Nothing is run: a schedule is plain data, checked on a clock.

    Try:
      shardpair schedule --picture schedules.png
      shardpair schedule --names 1f1b zero_bubble --stages 8 --microbatches 16 --trace pipeline.json
    """

    names: tuple[str, ...] = ()
    """Which of gpipe, 1f1b, interleaved, zero_bubble. Default: all; interleaved if its numbers fit."""
    stages: int = 4
    """Ranks of the pipeline."""
    microbatches: int = 8
    """Microbatches of a step."""
    chunks: int | None = None
    """Stages on each rank, for interleaved. Default: 2."""
    picture: Path | None = None
    """Save a picture (.png, .svg, .pdf)."""
    trace: Path | None = None
    """Save a Chrome trace (.json): open it in Perfetto or chrome://tracing."""
    json: bool = False
    """Print one JSON object on stdout instead of a table."""

    def __call__(self, default: Experiment) -> int:
        """Draw them. Returns 0."""
        check_output("--picture", self.picture, kinds=PICTURES)
        check_output("--trace", self.trace)
        check_names("--names", "schedule", self.names, SCHEDULES)
        for flag, count in (("stages", self.stages), ("microbatches", self.microbatches)):
            if count < 1:
                raise ExperimentError(f"--{flag} {count} must be at least 1")
        names = self.names or self._fitting()
        if self.chunks is not None and "interleaved" not in names:
            raise ExperimentError(
                f"--chunks {self.chunks} has no effect without interleaved, whose --microbatches are a "
                f"multiple of --stages"
            )
        chunks = CHUNKS if self.chunks is None else self.chunks
        schedules = {
            name: make_schedule(
                name,
                ranks=self.stages,
                microbatches=self.microbatches,
                chunks=chunks if name == "interleaved" else 1,
            )
            for name in names
        }
        costs = {name: cost_of(schedule) for name, schedule in schedules.items()}
        if self.json:
            print_json(costs)
        else:
            results_console().print(_table(costs))
        if self.picture:
            from compare.present.report.timeline import save_timelines

            save_timelines(self.picture, schedules)
        if self.trace:
            write_atomically(self.trace, chrome_trace(schedules))
        return 0

    def _fitting(self) -> Sequence[str]:
        """All schedules, but interleaved only where the stages divide the microbatches."""
        fits = self.stages > 0 and self.microbatches % self.stages == 0
        return [name for name in SCHEDULES if fits or name != "interleaved"]


def chrome_trace(schedules: dict[str, Schedule]) -> bytes:
    """The schedules as Chrome's trace events: a process for each schedule, a thread for each rank."""
    events: list[dict[str, object]] = []
    for process, (name, schedule) in enumerate(schedules.items()):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        for rank, task, start, end in run(schedule):
            events.append(
                {
                    "ph": "X",
                    "name": f"{task.kind}{task.microbatch}",
                    "cat": task.kind.name.lower(),
                    "pid": process,
                    "tid": rank,
                    "ts": start * MICROSECONDS,
                    "dur": (end - start) * MICROSECONDS,
                    "args": {"stage": task.stage, "microbatch": task.microbatch},
                }
            )
    return msgspec.json.encode({"traceEvents": events})


def cost_of(schedule: Schedule) -> ScheduleCost:
    """Run a schedule on the clock."""
    return ScheduleCost(
        makespan=makespan(schedule),
        waiting=bubble_fraction(schedule),
        activations_held=[peak_in_flight(own) for own in schedule],
    )


def _table(costs: dict[str, ScheduleCost]) -> Table:
    table = Table(title="Pipeline schedules (times in forwards of one microbatch through one rank)")
    for column in ("schedule", "makespan", "waiting", "activations held, by rank"):
        table.add_column(column, justify="right" if column in ("makespan", "waiting") else "left")
    for name, cost in costs.items():
        held = ", ".join(str(count) for count in cost.activations_held)
        table.add_row(name, f"{cost.makespan:g}", f"{cost.waiting:.1%}", held)
    return table
