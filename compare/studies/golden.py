"""`shardpair golden`: every engine held to the numbers of nanoGPT itself."""

from pathlib import Path

import msgspec

from compare.execute.launch import EnvironmentMissing
from compare.flags.arguments import FixedExperiment, Hidden
from compare.flags.chosen_layout import Spread
from compare.host.tensors import RecordError
from compare.judge.comparison import GOLDEN, Comparison
from compare.judge.goldens import NANOGPT, folder_of, read_golden
from compare.judge.ladder import Verdict, rungs_of
from compare.paired_study import Cases, PairedStudy, paired_findings
from compare.present.tables import rung_text
from compare.show.findings import Findings, Row, Table, Text
from compare.spec.experiment import Experiment, edited, revalidate
from compare.studies.cases import Case, Settings

SGD = {"name": "sgd", "momentum": 0.9}
"""What the second golden's optimizer has other than golden.toml's."""


class Golden(FixedExperiment, Spread, PairedStudy, frozen=True, kw_only=True):
    """Hold every engine to what nanoGPT's own train.py computed: 30 steps in float64, to 1e-10.

    Engines that agree may all be wrong in the same way; this shows it. The experiment is the one that nanoGPT
    was run on (compare/experiments/golden.toml), with AdamW and again with SGD; only its layout is yours to
    choose.

    Try:
      shardpair golden
      shardpair golden --preset fsdp --devices 2 --engines jax-manual torch-manual
    """

    experiment: Hidden[str] = GOLDEN

    brief = "every engine against the numbers of nanoGPT's own train.py"
    default = GOLDEN
    needs_first = False

    @property
    def gives_layouts(self) -> bool:
        """True if a preset replaces the experiment's layout."""
        return bool(self.preset)

    @property
    def title(self) -> str:
        """There is one experiment."""
        return GOLDEN

    def asked(self) -> Experiment:
        """The experiment under its layout."""
        return self.laid_out(super().asked())

    def run_settings(self) -> Settings:
        """nanoGPT's weights are kept after its last step."""
        return msgspec.structs.replace(self.settings(), later_step=self.train.max_iters)

    def cases(self, experiment: Experiment) -> Cases:
        """Each engine by AdamW and by SGD. Raises EnvironmentMissing: nanoGPT's numbers are damaged."""
        try:
            for optimizer in ("adamw", "sgd"):
                read_golden(folder_of(optimizer))
        except RecordError as error:
            raise EnvironmentMissing(str(error)) from None
        engines, left_out = self.fitting(experiment)
        return golden_cases(experiment, engines), left_out

    @classmethod
    def findings(cls, outcome: Comparison, folder: Path) -> Findings:
        """The worst error of every engine on every rung, and the verdict."""
        verdicts, (_, provenance) = outcome.verdicts, read_golden()
        rows = [
            Row(Text(rung), [rung_text(verdict, rung) for verdict in verdicts]) for rung in rungs_of(verdicts)
        ]
        worst = [max((rung.error for rung in verdict.rungs), default=0.0) for verdict in verdicts]
        rows.append(Row(Text("worst"), [Text(f"{error:.1e}") for error in worst], is_total=True))
        return paired_findings(
            outcome,
            title=f"Engines against {NANOGPT}",
            sentence=sentence_of(outcome),
            tables=[
                Table(
                    name=f"Relative errors against {NANOGPT} ({provenance.commit[:7]})",
                    corner="rung",
                    columns=[verdict.candidate for verdict in verdicts],
                    rows=rows,
                )
            ],
            passed=outcome.passed and not any(verdict.skipped for verdict in verdicts),
        )


def sentence_of(outcome: Comparison) -> str:
    """The verdict over all engines, in one line: every rung has to be there."""
    for verdict in outcome.verdicts if outcome.passed else ():
        for rung, why in verdict.skipped.items():
            return f"{verdict.candidate} against {NANOGPT}: {rung} was not compared: {why}"
    if not outcome.passed:
        return outcome.sentence()
    names = ", ".join(verdict.candidate for verdict in outcome.verdicts)
    rungs = min(len(verdict.rungs) for verdict in outcome.verdicts)
    left_out = "".join(f"; {name} was left out ({why})" for name, why in outcome.left_out.items())
    worst = max(_worst(verdict) for verdict in outcome.verdicts)
    return f"PASS: {names}: equal to {NANOGPT} on {rungs} rungs; worst error {worst:.1e}{left_out}"


def _worst(verdict: Verdict) -> float:
    return max(rung.error for rung in verdict.rungs)


def golden_cases(experiment: Experiment, engines: list[str]) -> list[Case]:
    """Each engine with the experiment as it is, and with SGD."""
    by_sgd = revalidate(edited(experiment, {"optimizer": SGD}))
    return [
        Case(name=f"{engine}{suffix}", engine=engine, experiment=one)
        for engine in engines
        for suffix, one in (("", experiment), (".sgd", by_sgd))
    ]
