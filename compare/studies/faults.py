"""`shardpair faults`: plant every known mistake, and show which rung of the ladder catches it."""

from pathlib import Path

from compare.flags.arguments import StudiedName, chosen_engines
from compare.judge.comparison import Comparison
from compare.judge.ladder import Verdict
from compare.paired_study import Cases, PairedStudy, paired_findings
from compare.show.findings import Column, Findings, table_of
from compare.spec.experiment import Experiment, ExperimentError
from compare.studies.known_faults import FAULTS, fault_cases, planted
from compare.terminal import error_text

DEVICES = 4


class Faults(PairedStudy, frozen=True, kw_only=True):
    """Check the checker: plant each known mistake in each engine; the ladder must turn red at the right rung.

    Try:
      shardpair faults
      shardpair faults --engines torch-manual --names dropped_all_reduce sum_for_mean
    """

    engines: tuple[StudiedName, ...] = ()
    """Engines to plant faults in. Default: all of the grid."""
    names: tuple[str, ...] = ()
    """Which faults. Default: all."""
    devices: int | None = None
    """Devices of data parallelism; faults of other layouts have devices of their own. Default: 4."""

    brief = "plant each known mistake: every check must turn red"
    default = "check"
    own_layouts = "every fault has a layout of its own"
    own_weights = "faults are measured with the seed's weights"

    @property
    def title(self) -> str:
        """Whatever the experiment."""
        return "faults"

    def cases(self, experiment: Experiment) -> Cases:
        """The reference, and a case for each fault in each engine."""
        devices = DEVICES if self.devices is None else self.devices
        own_layouts = self.names and all(name in FAULTS and FAULTS[name].preset for name in self.names)
        if self.devices is not None and own_layouts:
            raise ExperimentError(
                f"--devices {self.devices} has no effect on {', '.join(self.names)}, which show in a "
                f"layout of their own: leave it out"
            )
        return fault_cases(
            experiment, chosen_engines(self.engines), names=list(self.names), devices=devices
        ), {}

    @classmethod
    def findings(cls, outcome: Comparison, folder: Path) -> Findings:
        """Every planted fault, and the rung that caught it."""
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


def is_right(verdict: Verdict) -> bool:
    """True if a fault failed first at the rung that it belongs to."""
    return verdict.failure is not None and verdict.failure.rung == planted(verdict.candidate)[0].rung


def caught_as_expected(comparison: Comparison) -> bool:
    """True if every planted fault was run, at least one, and failed first at the rung that it belongs to."""
    return comparison.is_complete and bool(comparison.verdicts) and all(map(is_right, comparison.verdicts))
