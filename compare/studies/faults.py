"""`shardpair faults`: plant every known mistake, and show which rung of the ladder catches it."""

import shutil
from pathlib import Path

from compare.flags.arguments import StudiedName, chosen_engines
from compare.judge.comparison import Comparison
from compare.judge.ladder import Verdict
from compare.paired_study import Cases, PairedStudy, paired_findings
from compare.show.findings import Column, Findings, table_of
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import Experiment, ExperimentError, edited
from compare.studies.cases import Case
from compare.studies.damages import SINGLE
from compare.studies.harness_faults import PAIR, Caught, plant_all
from compare.studies.known_faults import FAULTS, fault_cases, planted
from compare.studies.presets import spread
from compare.terminal.units import error_text

DEVICES = 4


class Faults(PairedStudy, frozen=True, kw_only=True):
    """Check the checker: plant each known mistake in each engine; the ladder must turn red at the right rung.

    Try:
      shardpair faults
      shardpair faults --engines torch-manual --names dropped_all_reduce sum_for_mean
      shardpair faults --harness
    """

    engines: tuple[StudiedName, ...] = ()
    """Engines to plant faults in. Default: all of the grid."""
    names: tuple[str, ...] = ()
    """Which faults. Default: all."""
    devices: int | None = None
    """Devices of data parallelism; faults of other layouts have devices of their own. Default: 4."""
    harness: bool = False
    """Plant faults of the harness instead: train two engines, damage copies of their records, mostly both
    alike, and hold them against each other; every one must turn red. Default: the first two that are written
    by hand, since the number of a compiler's messages is held to nothing."""

    brief = "plant each known mistake: every check must turn red"
    default = "check"
    own_layouts = "every fault has a layout of its own"
    own_weights = "faults are measured with the seed's weights"

    @property
    def title(self) -> str:
        """Whatever the experiment."""
        return "faults"

    def cases(self, experiment: Experiment) -> Cases:
        """The reference, and a case for each fault in each engine; or the runs that are damaged later."""
        by_hand = tuple(name for name, engine in STUDIED.items() if not engine.sends_by)
        engines = chosen_engines(self.engines or (by_hand if self.harness else ()))
        devices = DEVICES if self.devices is None else self.devices
        if self.harness:
            return self._to_be_damaged(experiment, engines, devices), {}
        own_layouts = self.names and all(name in FAULTS and FAULTS[name].preset for name in self.names)
        if self.devices is not None and own_layouts:
            raise ExperimentError(
                f"--devices {self.devices} has no effect on {', '.join(self.names)}, which show in a "
                f"layout of their own: leave it out"
            )
        return fault_cases(experiment, engines, names=list(self.names), devices=devices), {}

    def _to_be_damaged(self, experiment: Experiment, engines: list[str], devices: int) -> list[Case]:
        if self.names:
            raise ExperimentError(f"--names {self.names[0]} has no effect with --harness: leave it out")
        if len(engines) < len(PAIR):
            raise ExperimentError("--harness holds two engines against each other: name two, or none")
        if not experiment.train.eval_interval:  # evaluations are damaged, too
            experiment = edited(experiment, {"train": {"eval_interval": 2, "eval_iters": 1}})
        sharded = spread(experiment, "ddp", devices)
        cases = [Case(name=n, engine=e, experiment=sharded) for n, e in zip(PAIR, engines, strict=False)]
        return [*cases, Case(name=SINGLE, engine=engines[1], experiment=spread(experiment, "single"))]

    @classmethod
    def findings(cls, outcome: Comparison, folder: Path) -> Findings:
        """Every planted fault, and the rung that caught it."""
        if SINGLE in outcome.requests:
            return _of_harness(outcome, folder)
        total = sum("." in name for name in outcome.requests)  # the others are references
        caught = sum(is_right(verdict) for verdict in outcome.verdicts)
        return paired_findings(
            outcome,
            title="Planted faults",
            sentence=f"{caught} of {total} faults caught at the right rung",
            tables=[table_of("Planted faults, and the rung that caught each", COLUMNS, outcome.verdicts)],
            warnings=[] if outcome.is_complete else [outcome.sentence()],
            passed=caught_as_expected(outcome),
        )


COLUMNS = (
    Column[Verdict]("fault", lambda one: planted(one.candidate)[0].name),
    Column[Verdict]("engine", lambda one: planted(one.candidate)[1]),
    Column[Verdict]("expected rung", lambda one: planted(one.candidate)[0].rung),
    Column[Verdict]("caught at", lambda one: one.failure.rung if one.failure else "nothing"),
    Column[Verdict]("where", lambda one: one.failure.worst if one.failure else ""),
    Column[Verdict]("error", lambda one: error_text(one.failure.error) if one.failure else ""),
    Column[Verdict](
        "",
        lambda one: "ok" if is_right(one) else "WRONG",
        news=lambda one: "pass" if is_right(one) else "fail",
    ),
)
HARNESS_COLUMNS = (
    Column[Caught]("fault", lambda one: one.fault),
    Column[Caught]("records", lambda one: "both" if one.both else "one"),
    Column[Caught]("expected", lambda one: one.expected or "passes"),
    Column[Caught]("caught at", lambda one: one.rung or "nothing"),
    Column[Caught]("verdict", lambda one: one.sentence),
)


def _of_harness(outcome: Comparison, folder: Path) -> Findings:
    """Damage copies of the records, and hold them against each other."""
    if not outcome.is_complete:
        raise ExperimentError(outcome.sentence())
    scratch = folder / "planted"
    shutil.rmtree(scratch, ignore_errors=True)  # of a run that is continued
    caught = plant_all(folder, scratch)
    wrong = [one.fault for one in caught if not one.is_right]
    sentence = f"{len(caught) - 1} faults of the harness are red, and the control passes"
    title = "Records that are not what was asked for, and what the harness says of each"
    return paired_findings(
        outcome,
        title=title,
        sentence=f"WRONG: {', '.join(wrong)}" if wrong else sentence,
        tables=[table_of(title, HARNESS_COLUMNS, caught, look="words")],
        value=caught,
        passed=not wrong,
    )


def is_right(verdict: Verdict) -> bool:
    """True if a fault failed first at the rung that it belongs to."""
    return verdict.failure is not None and verdict.failure.rung == planted(verdict.candidate)[0].rung


def caught_as_expected(comparison: Comparison) -> bool:
    """True if every planted fault was run, at least one, and failed first at the rung that it belongs to."""
    return comparison.is_complete and bool(comparison.verdicts) and all(map(is_right, comparison.verdicts))
