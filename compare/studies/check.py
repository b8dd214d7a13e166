"""`shardpair check`: every engine, on one device and on each rung of its ladder, against one reference."""

from pathlib import Path

from compare.flags.arguments import EngineName, chosen_engines
from compare.judge.comparison import Comparison
from compare.judge.ladder import Verdict
from compare.paired_study import Cases, PairedStudy, paired_findings
from compare.present.tables import rung_text
from compare.show.findings import Findings, Row, Table, Text
from compare.spec.experiment import Experiment, ExperimentError
from compare.studies.cases import ladder_cases
from compare.terminal import error_text

SHOWN = ("gradients", "later_weights")
"""Rungs whose worst tensor is named."""


class Check(PairedStudy, frozen=True, kw_only=True):
    """Prove that every engine and gradient synchronisation computes what one unsharded device computes.

    The experiment is a tiny one in float64 unless you name another; nothing is timed.

    Try:
      shardpair check
      shardpair check --devices 2 --engines jax-manual torch-manual
      shardpair check check --precision.dtype float32
    """

    engines: tuple[EngineName, ...] = ()
    """Which engines. Default: all of the grid. A peer on one device: --devices 1."""
    devices: int = 4
    """Devices of data parallelism; 1 checks the engines unsharded only."""

    brief = "every engine against one unsharded device, in float64"
    default = "check"
    own_layouts = "check has layouts of its own"

    @property
    def title(self) -> str:
        """The devices tell two checks apart."""
        return f"check-{self.devices}"

    def cases(self, experiment: Experiment) -> Cases:
        """The unsharded reference, and every rung of every engine's ladder."""
        if self.devices < 1:
            raise ExperimentError(f"--devices {self.devices} must be at least 1")
        return ladder_cases(experiment, chosen_engines(self.engines), self.devices), {}

    @classmethod
    def findings(cls, outcome: Comparison, folder: Path) -> Findings:
        """The worst errors of every case."""
        columns = ["loss", "gradients", "worst gradient", "weights after N steps", "worst weight", "verdict"]
        rows = [
            Row(
                Text(one.candidate),
                [rung_text(one, "loss"), *(cell for rung in SHOWN for cell in _worst(one, rung)), _mark(one)],
            )
            for one in outcome.verdicts
        ]
        dtype = outcome.experiment.precision.dtype
        name = f"Relative errors against one unsharded device ({dtype})"
        return paired_findings(
            outcome,
            title=f"{outcome.name}: {len(outcome.cases)} cases",
            tables=[Table(name=name, corner="case", columns=columns, rows=rows, look="words")],
            notes=[worst_of(rung, outcome.verdicts) for rung in SHOWN] if rows else [],
        )


def worst_of(rung: str, verdicts: list[Verdict]) -> str:
    """The largest error on a rung, and whose it is."""
    errors = {verdict.candidate: verdict.error(rung) or 0.0 for verdict in verdicts}
    worst = max(errors, key=errors.__getitem__)
    return f"worst of {rung}: {error_text(errors[worst])} ({worst})"


def _worst(verdict: Verdict, rung: str) -> tuple[Text, Text]:
    result = next((result for result in verdict.rungs if result.rung == rung), None)
    return rung_text(verdict, rung), Text(result.worst if result else "")


def _mark(verdict: Verdict) -> Text:
    if verdict.failure is None:
        return Text("PASS", news="pass")
    return Text(f"FAIL at {verdict.failure.rung}", news="fail")
