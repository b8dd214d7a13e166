"""`shardpair faults`: plant the mistakes that people make, and show which rung of the ladder catches each.

The mistakes are data: `compare/faults.toml`. A wrong value in the spec goes to one engine. A mistake in the
code is a diff: the engine runs a patched copy of its source.
"""

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from compare.contract.record import Record, Step
from compare.contract.request import Request
from compare.execute.launch import launch
from compare.flags import StudiedName, checked_pythons, chosen_engines, hosts_of
from compare.judge.ladder import Verdict
from compare.judge.outcome import Case, Grid, Outcome
from compare.run.study import OF_LAYOUTS, Study
from compare.setup.planted import ROOT, Diff, Fault, load_faults, packages_of, patched_copy
from compare.setup.presets import PRESETS, check_names, edits_of, spread
from compare.show.findings import Column, Findings, table_of, verdict_findings
from compare.spec.engines.registry import ENGINES, REFERENCE
from compare.spec.experiment import Experiment, ExperimentError, edited, revalidate
from compare.terminal import error_text, results_console

SIXTEEN_BITS, UNDROPPED = "precision.dtype=bfloat16", "model.dropout=0.0"
EXPERTS = "model.n_experts=8"
REFERENCES = {
    SIXTEEN_BITS: "reference-16-bits",
    UNDROPPED: "reference-undropped",
    EXPERTS: "reference-experts",
}
"""The reference of the mistakes with these settings, which change the numbers."""
FAULTS = load_faults()
DROPOUT = 0.2
"""The dropout of all cases, unless the experiment has its own: without it some mistakes change nothing."""
DEVICES = 4


class Faults(Study, frozen=True, kw_only=True):
    """Check the checker: plant each known mistake in each engine; the ladder must turn red at the right rung.

    Try:
      shardpair faults
      shardpair faults --engines torch-manual --names dropped_all_reduce sum_for_mean
      shardpair faults --names sum_for_mean --dry_run    (print the changed lines)
    """

    engines: tuple[StudiedName, ...] = ()
    """Engines to plant faults in. Default: all of the grid."""
    names: tuple[str, ...] = ()
    """Which faults. Default: all."""
    devices: int = DEVICES
    """Devices of data parallelism; faults of other layouts have devices of their own."""

    brief = "plant each known mistake: every check must turn red"
    group = "Prove"
    default = "check"
    fixed: ClassVar = {**OF_LAYOUTS, "init_from": None}
    needs_reference = True
    keeps_records = True

    def cases(self, experiment: Experiment) -> Grid:
        """The references, and a case for each fault in each engine. Raises ExperimentError."""
        engines = chosen_engines(self.engines)
        cases = fault_cases(experiment, engines, names=list(self.names), devices=self.devices)
        for diff in (diff for name, case in cases.items() if case.against for diff in diffs_of(name)):
            diff.applied(ROOT)
        return cases, {}

    def measured(
        self, name: str, case: Case, place: Path, number: int, tell: Callable[[Step], None]
    ) -> tuple[Any, Record | None]:
        """Run a case; with a mistake in the code, from a patched copy of the source."""
        if not case.against or not (diffs := diffs_of(name)):
            return super().measured(name, case, place, number, tell)
        # The copy is beside the record: on several hosts all of them read this folder.
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=f"{name}.source-") as source:
            patched_copy(Path(source), diffs, packages_of(diffs))
            record = launch(
                case.request,
                place,
                pythons=checked_pythons(self),
                hosts=hosts_of(self),
                on_step=tell,
                source=Path(source),
            )
        return self.keep(case, record), record

    def __call__(self) -> int:
        """Answer it; --dry_run also prints the changes. Returns 0 if every fault is caught at its rung."""
        code = super().__call__()
        if self.dry_run and not self.json:
            for change, names in changes(self.planned()).items():
                results_console().print(f"\n{names}\n{change}", markup=False, highlight=False, soft_wrap=True)
        return code

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """Every planted fault, and the rung that caught it."""
        total = sum(bool(case.against) for case in outcome.cases.values())
        caught = sum(is_right(verdict) for verdict in outcome.verdicts)
        return verdict_findings(
            outcome,
            title="Planted faults",
            sentence=f"{caught} of {total} faults caught at the right rung",
            tables=[table_of("Planted faults, and the rung that caught each", COLUMNS, outcome.verdicts)],
            notes=[f"{names}:\n{change}" for change, names in changes(outcome).items()],
            passed=caught_as_expected(outcome),
        )


COLUMNS = (
    Column[Verdict]("fault", lambda verdict: planted(verdict.candidate)[0].name),
    Column[Verdict]("engine", lambda verdict: planted(verdict.candidate)[1]),
    Column[Verdict]("expected rung", lambda verdict: planted(verdict.candidate)[0].rung),
    Column[Verdict]("caught at", lambda verdict: verdict.failure.rung if verdict.failure else "nothing"),
    Column[Verdict]("where", lambda verdict: verdict.failure.worst if verdict.failure else ""),
    Column[Verdict]("error", lambda verdict: error_text(verdict.failure.error) if verdict.failure else ""),
    Column[Verdict](
        "",
        lambda verdict: "ok" if is_right(verdict) else "WRONG",
        news=lambda verdict: "pass" if is_right(verdict) else "fail",
    ),
)


def is_right(verdict: Verdict) -> bool:
    """True if a fault failed first at the rung that it belongs to."""
    return verdict.failure is not None and verdict.failure.rung == planted(verdict.candidate)[0].rung


def caught_as_expected(outcome: Outcome) -> bool:
    """True if every planted fault was run, at least one, and failed first at the rung that it belongs to."""
    return outcome.is_complete and bool(outcome.verdicts) and all(map(is_right, outcome.verdicts))


def fault_cases(
    experiment: Experiment, engines: list[str], *, names: list[str], devices: int
) -> dict[str, Case]:
    """The unsharded references, and one case for each fault in each engine that can make it.

    Two optimizer steps are enough: every rung up to the moments is climbed in the first.
    Raises ExperimentError.
    """
    check_names("--names", "fault", names, FAULTS)
    if devices < 2:
        raise ExperimentError(f"--devices {devices}: most faults show between devices only; give 2 or more")
    dropout = experiment.model.dropout or DROPOUT
    short = edited(experiment, {"train": {"max_iters": 2}, "model": {"dropout": dropout}})
    chosen = [FAULTS[name] for name in names or FAULTS]
    cases = {"reference": _case(REFERENCE, spread(short, "single"))}
    for settings, name in REFERENCES.items():
        if any(fault.settings == settings for fault in chosen):
            cases[name] = _case(REFERENCE, spread(edited(short, edits_of(settings)), "single"))
    whys = set()
    for fault, engine in itertools.product(chosen, engines):
        if why := fault.impossible.get(engine):
            whys.add(f"{fault.name}: {engine}: {why}")
            continue
        over = PRESETS[fault.preset].devices if fault.preset else devices
        sharded = spread(edited(short, edits_of(fault.settings)), fault.preset or "ddp", over)
        ENGINES[engine].require_experiment(sharded)
        edit = edits_of(fault.edit)
        if fault.name == "warmup_off_by_one":  # relative to the experiment's own
            edit = {"optimizer": {"warmup_iters": sharded.optimizer.warmup_iters - 1}}
        cases[f"{fault.name}.{engine}"] = _case(
            engine,
            revalidate(edited(sharded, edit)),
            against=REFERENCES.get(fault.settings, "reference"),
        )
    if not any(case.against for case in cases.values()):
        raise ExperimentError(f"no fault is left to plant: {'; '.join(sorted(whys))}")
    return cases


def _case(engine: str, experiment: Experiment, *, against: str = "") -> Case:
    request = Request(engine=engine, experiment=experiment, ladder=True)
    return Case(request=request, against=against, same_training=False)


def planted(case_name: str) -> tuple[Fault, str]:
    """The fault and the engine of a case made by `fault_cases`."""
    fault, _, engine = case_name.rpartition(".")
    return FAULTS[fault], engine


def diffs_of(case_name: str) -> list[Diff]:
    """The changes that plant the mistake of a case made by `fault_cases`."""
    fault, engine = planted(case_name)
    return fault.diffs(engine)


def changes(outcome: Outcome) -> dict[str, str]:
    """The changes of all cases, as diffs, and the names of the cases with each."""
    named: dict[str, list[str]] = {}
    for name, case in outcome.cases.items():
        for diff in diffs_of(name) if case.against else ():
            named.setdefault(diff.unified(), []).append(name)
    return {change: ", ".join(names) for change, names in named.items()}
