"""`shardpair tune`: plan for this machine, time the best layouts here, and say how well the plan ranked."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from compare.flags.arguments import Hidden, StudiedName
from compare.flags.pythons import checked_pythons
from compare.host.disk import write_atomically
from compare.judge.outcome import Grid, Outcome
from compare.plan.machine import Machine
from compare.plan.predict import predict
from compare.plan.search import Candidate, search
from compare.plan.tuned import COLUMNS, against, by_engine, rows_of, said, tuned
from compare.show.findings import Findings, table_of
from compare.spec.engines.registry import REFERENCE, STUDIED
from compare.spec.experiment import Experiment, ExperimentError, edited, to_toml
from compare.studies.presets import check_names
from compare.studies.this_machine import HERE, machine_of
from compare.timing import Timed, timed_findings

WINNER = "winner.toml"
NOTHING: Mapping[str, Machine] = {}
ABOUT = (
    "Predicted from products, memory and an all-reduce as they were measured. Error: predicted over measured "
    "step time, less 1; after one factor: with the engine's median ratio divided out."
)


class Tune(Timed, frozen=True, kw_only=True):
    """Plan for this machine, time the best layouts in rounds, and print the fastest as a TOML file.

    What is clearly slower is timed no more after two rounds. Predictions are held against times: errors, and
    Kendall's tau, 1 for the same order and -1 for the reverse, for each engine.

    Try:
      shardpair tune cpu --data.source synthetic --devices 2 --best 4 --rounds 3
      shardpair tune demo --engines torch-manual jax-manual --devices 4 --spread --best 12 --rounds 2
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
    spread: bool = False
    """Time layouts from all over the ranking, evenly, to see how well it ranks."""
    budget: float = 0.0
    """Minutes: none but the first round begins after that. 0 for no end."""

    brief = "plan, time the best layouts here, print the winner as TOML"

    machines: Hidden[Mapping[str, Machine]] = NOTHING
    """By engine, once measured."""

    def planned(self) -> Outcome:
        """The cases. Raises ExperimentError: bad numbers, or a dry run that would have to measure.

        Raises:
            EnvironmentMissing: this machine is busy, or a side is missing.
        """
        if self.best < 1 or self.budget < 0:
            raise ExperimentError(
                f"--best {self.best} must be at least 1, --budget {self.budget:g} at least 0"
            )
        if self.dry_run and self.machine == HERE:
            raise ExperimentError(
                "--dry_run measures nothing: give --machine a file that an earlier plan kept"
            )
        check_names("--engines", "engine", self.engines, STUDIED)
        asked, pythons, hosts = self.asked(), checked_pythons(self), self.found_hosts()
        machines = {
            name: machine_of(
                self.machine,
                self.devices,
                name,
                asked,
                pythons=pythons,
                hosts=hosts,
                anyway=self.anyway,
            )
            for name in self.engines
        }
        planned = super(Tune, msgspec.structs.replace(self, machines=machines)).planned()
        predicted = {
            name: 1e3 * predict(case.engine, case.experiment, machines[case.engine]).seconds
            for name, case in planned.cases.items()
        }
        more = {"machines": machines, "predicted_ms": predicted, "budget_s": 60 * self.budget}
        return msgspec.structs.replace(planned, more=planned.more | msgspec.to_builtins(more))

    def cases(self, experiment: Experiment) -> Grid:
        """The best layouts of each engine, or some from all over its ranking."""
        cases, left_out = {}, {}
        for engine, machine in self.machines.items():
            found = search(engine, experiment, machine, fixed=self.said.flags)
            if not found.fitting:
                raise ExperimentError(f"{engine}: none of {len(found.too_large):,} layouts fits this machine")
            left_out |= {f"{engine} {names}": why for names, why in found.refused.items()}
            for one in some_of(found.fitting, self.best, spread=self.spread):
                case = self.case(engine, one.of(experiment), layout=one.name)
                cases[case.name] = case
        return cases, left_out

    def is_given_up(self, outcome: Outcome, name: str) -> bool:
        """True for a case that is clearly slower; or if all that is left is beyond the budget."""
        return tuned(outcome).is_given_up(outcome.cases[name])

    def after(self, outcome: Outcome, folder: Path) -> Outcome:
        """Leave the fastest layout as an experiment, and what was planned for."""
        view = tuned(outcome)
        for engine, machine in view.machines.items():
            write_atomically(folder / f"{HERE}-{engine}.toml", msgspec.toml.encode(machine))
        if rows := rows_of(view):
            best = min(rows, key=lambda row: row.measured_ms.median)
            (case,) = (one for one in view.cases if (one.engine, one.layout) == (best.engine, best.layout))
            length = {"train": {"max_iters": outcome.experiment.train.max_iters}}
            write_atomically(folder / WINNER, to_toml(edited(case.experiment, length)).encode())
        return outcome

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """Every layout, predicted and measured; and how well each engine's were ranked."""
        view = tuned(outcome)
        rows = sorted(rows_of(view), key=lambda row: row.measured_ms.median)
        best, words = rows[0], [f"{engine}: {said(own)}" for engine, own in by_engine(rows).items()]
        return timed_findings(
            view,
            outcome,
            title=f"{outcome.name}: {len(rows)} layouts timed",
            sentence=f"the fastest is {best.engine} {best.layout}, {best.measured_ms.median:.1f} ms a step: "
            f"{folder / WINNER}; {'; '.join(words)}",
            about=[ABOUT],
            tables=[table_of("Predicted and measured", COLUMNS, rows)],
            figures=[against(rows)],
            rows=rows,
        )


def some_of(ranked: Sequence[Candidate], count: int, *, spread: bool) -> list[Candidate]:
    """The first of a ranking; or, spread, as many from all over it, the first and the last among them."""
    if not spread or len(ranked) <= count:
        return list(ranked[:count])
    places = [round(place * (len(ranked) - 1) / max(count - 1, 1)) for place in range(count)]
    return [ranked[place] for place in places]
