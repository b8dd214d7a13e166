"""`shardpair tune`: plan for this machine, time the best layouts here, and say how well the plan ranked."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from compare.flags import Hidden, StudiedName, checked_pythons
from compare.host.disk import write_atomically
from compare.judge.outcome import Grid, Outcome
from compare.judge.statistics import Estimate, estimate
from compare.judge.timed_outcome import timed
from compare.plan.machine import Machine, read_machine
from compare.plan.predict import predict
from compare.plan.search import search
from compare.show.findings import Column, Findings, table_of
from compare.spec.engines.registry import REFERENCE, STUDIED
from compare.spec.experiment import Experiment, ExperimentError, edited, to_toml
from compare.studies.presets import check_names
from compare.studies.this_machine import HERE, machine_here
from compare.timing import Timed, timed_findings

WINNER = "winner.toml"
NOTHING: Mapping[str, Machine] = {}
ABOUT = (
    "Predicted from products, memory and an all-reduce{source}. Error: predicted over measured step time, "
    "less 1; after one factor: with the engine's median ratio divided out."
)


class Tune(Timed, frozen=True, kw_only=True):
    """Plan for this machine, time the best layouts in rounds, and print the fastest as a TOML file.

    Predictions are held against times: errors, and Kendall's tau, 1 for the same order and -1 for the
    reverse, for each engine.

    Try:
      shardpair tune cpu --data.source synthetic --devices 2 --best 4 --rounds 3
      shardpair tune demo --engines torch-manual jax-manual --devices 4 --best 12 --rounds 2
    """

    engines: tuple[StudiedName, ...] = (REFERENCE,)
    """Which engines, each with its best layouts."""
    devices: int = 2
    """Devices of this machine's CPU, or of all hosts."""
    machine: str = HERE
    """here: measure products, memory and all-reduce first, inside a host and across hosts, about a minute an
    engine. Or a file that an earlier tune has kept."""
    best: int = 6
    """Layouts of each engine that are timed."""

    brief = "plan, time the best layouts here, print the winner as TOML"

    machines: Hidden[Mapping[str, Machine]] = NOTHING
    """By engine, once measured."""

    def planned(self) -> Outcome:
        """The cases, once the machine was measured. Raises ExperimentError, EnvironmentMissing."""
        if self.best < 1:
            raise ExperimentError(f"--best {self.best} must be at least 1")
        if self.dry_run and self.machine == HERE:
            raise ExperimentError("--dry_run measures nothing: give --machine a file that tune has kept")
        check_names("--engines", "engine", self.engines, STUDIED)
        asked, machines = self.asked(), {}
        how: dict[str, Any] = {"pythons": checked_pythons(self), "hosts": self.found_hosts()}
        how["anyway"] = self.anyway
        for name in self.engines:
            here = self.machine == HERE
            machine = machine_here(name, asked, self.devices, **how) if here else read_machine(self.machine)
            if machine.devices != self.devices:
                has = f"--machine {self.machine} has {machine.devices} devices"
                raise ExperimentError(f"{has}, --devices {self.devices}: make them one")
            machines[name] = machine
        planned = super(Tune, replace(self, machines=machines)).planned()
        predicted = {
            name: 1e3 * predict(case.engine, case.experiment, machines[case.engine]).seconds
            for name, case in planned.cases.items()
        }
        more = {"machines": machines, "predicted_ms": predicted}
        return replace(planned, more=planned.more | msgspec.to_builtins(more))

    def cases(self, experiment: Experiment) -> Grid:
        """The best layouts of each engine."""
        cases, left_out = {}, {}
        for engine, machine in self.machines.items():
            found = search(engine, experiment, machine, fixed=self.said.flags)
            if not found.fitting:
                raise ExperimentError(f"{engine}: none of {len(found.too_large):,} layouts fits this machine")
            left_out |= {f"{engine} {names}": why for names, why in found.refused.items()}
            for candidate in found.fitting[: self.best]:
                case = self.case(engine, candidate.of(experiment), layout=candidate.name)
                cases[case.name] = case
        return cases, left_out

    def after(self, outcome: Outcome, folder: Path) -> Outcome:
        """Leave the fastest layout as an experiment, and what was planned for."""
        for engine, fields in outcome.more["machines"].items():
            write_atomically(folder / f"{HERE}-{engine}.toml", msgspec.toml.encode(fields))
        if rows := rows_of(outcome):
            best = min(rows, key=lambda row: row.measured_ms.median)
            length = {"train": {"max_iters": outcome.experiment.train.max_iters}}
            winner = edited(outcome.cases[best.case].experiment, length)
            write_atomically(folder / WINNER, to_toml(winner).encode())
        return outcome

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """Every layout, predicted and measured; and how well each engine's were ranked."""
        rows = sorted(rows_of(outcome), key=lambda row: row.measured_ms.median)
        machine, best = outcome.options["machine"], rows[0]
        source = " as measured" if machine == HERE else f" as {machine} has them"
        by_engine: dict[str, list[Row]] = {}
        for row in rows:
            by_engine.setdefault(row.engine, []).append(row)
        accuracies = (f"{engine}, {accuracy(of)}." for engine, of in by_engine.items())
        return timed_findings(
            timed(outcome),
            title=f"{outcome.name}: {len(rows)} layouts timed",
            sentence=f"the fastest is {best.engine} {best.layout}, {best.measured_ms.median:.1f} ms a step: "
            f"{folder / WINNER}",
            about=[ABOUT.format(source=source), *accuracies],
            tables=[table_of("Predicted and measured", COLUMNS, rows)],
            rows=rows,
        )


class Row(Struct, frozen=True, kw_only=True):
    """One layout of one engine: predicted and measured."""

    case: str
    engine: str
    layout: str
    predicted_ms: float
    measured_ms: Estimate
    error: float


COLUMNS = (
    Column[Row]("layout", lambda row: row.layout),
    Column[Row]("engine", lambda row: row.engine),
    Column[Row]("predicted ms", lambda row: row.predicted_ms, ".1f"),
    Column[Row]("measured ms", lambda row: row.measured_ms, ".1f"),
    Column[Row]("rounds", lambda row: row.measured_ms.rounds, "d"),
    Column[Row]("error", lambda row: row.error, "+.0%"),
)


def rows_of(outcome: Outcome) -> list[Row]:
    """A row for each case that finished once."""
    view, predicted, rows = timed(outcome), outcome.more["predicted_ms"], []
    for name, case in outcome.cases.items():
        if rounds := view.measurements.get(name):
            measured = estimate([process.wall_ms for process in rounds.values()])
            row = Row(
                case=name,
                engine=case.engine,
                layout=case.layout,
                predicted_ms=predicted[name],
                measured_ms=measured,
                error=predicted[name] / measured.median - 1,
            )
            rows.append(row)
    return rows


def accuracy(rows: Sequence[Row]) -> str:
    """How well the layouts of one engine were predicted."""
    words, factor = [f"{len(rows)} layouts"], statistics.median(1 + row.error for row in rows)
    for name, divided in (("median error", 1.0), ("after one factor", factor)):
        sizes = [abs((1 + row.error) / divided - 1) for row in rows]
        words.append(f"{name} {statistics.median(sizes):.0%}, worst {max(sizes):.0%}")
    tau = kendall([row.predicted_ms for row in rows], [row.measured_ms.median for row in rows])
    return ", ".join([*words, *([f"Kendall's tau {tau:.2f}"] if tau is not None else [])])


def kendall(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Kendall's tau-b of two orders; None of fewer than three, or where all are the same."""
    from scipy.stats import kendalltau  # half a second to import

    tau = float(kendalltau(predicted, measured).statistic) if len(predicted) > 2 else math.nan
    return None if math.isnan(tau) else tau
