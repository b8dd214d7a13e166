"""`shardpair faults`: plant the mistakes that people make, and show which rung of the ladder catches each.

The mistakes are data: `compare/faults.toml`. A wrong value in the spec goes to one engine. A mistake in the
code is a diff: the engine runs a patched copy of its source.
"""

import itertools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from msgspec.structs import replace

from compare.contract.record import Record, Step
from compare.contract.request import Request
from compare.execute.launch import launch
from compare.flags import StudiedName, checked_pythons, chosen_engines, hosts_of
from compare.judge.ladder import Verdict
from compare.judge.outcome import Case, Grid, Outcome
from compare.run.study import OF_LAYOUTS, Study, findings_in
from compare.setup.planted import ROOT, Diff, Fault, load_faults, packages_of, patched_copy
from compare.setup.presets import PRESETS, check_names, edits_of, spread
from compare.show.findings import Column, Findings, table_of, verdict_findings
from compare.show.page import write_page
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
"""The references by the setting that changes their numbers."""
FAULTS = load_faults()
DROPOUT = 0.2
"""The dropout of all cases, unless the experiment has its own: without it some mistakes change nothing."""
DEVICES = 4
CHANGE = "planted.diff"
"""The file in the folder of a case with the change of the source."""


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
        (place / CHANGE).write_text(change_of(name), encoding="utf-8")
        return self.keep(case, record), record

    def __call__(self) -> int:
        """Run the study; --dry_run also prints the changes. Returns 0 if each fault is caught at its rung."""
        code = super().__call__()
        if self.dry_run and not self.json:
            changes = {name: change_of(name) for name, case in self.planned().cases.items() if case.against}
            for line in grouped(changes):
                results_console().print(f"\n{line}", soft_wrap=True)
        return code

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """Every planted fault, and the rung that caught it; the changes of faults that were not caught."""
        wrong = [verdict.candidate for verdict in outcome.verdicts if not is_right(verdict)]
        total = sum(bool(case.against) for case in outcome.cases.values())
        caught = sum(is_right(verdict) for verdict in outcome.verdicts)
        return verdict_findings(
            outcome,
            title="Planted faults",
            sentence=f"{caught} of {total} faults caught at the right rung",
            tables=[table_of("Planted faults, and the rung that caught each", COLUMNS, outcome.verdicts)],
            notes=grouped({name: recorded_change(folder / name) for name in wrong}),
            passed=caught_as_expected(outcome),
        )

    @classmethod
    def leave(cls, outcome: Outcome, folder: Path) -> Path:
        """Write the page, with the changes of all faults. Returns its path."""
        changes = grouped({name: recorded_change(folder / name) for name in outcome.cases})
        found = replace(findings_in(cls, outcome, folder), notes=changes)
        return write_page(folder / f"{outcome.study}.html", found)


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
    for setting, name in REFERENCES.items():
        if any(reference_of(fault) == name for fault in chosen):
            cases[name] = _case(REFERENCE, spread(edited(short, edits_of(setting)), "single"))
    whys = set()
    for fault, engine in itertools.product(chosen, engines):
        if not fault.is_planted_in(engine):
            whys.add(f"{fault.name}: {engine}: {fault.impossible.get(engine, 'it has no diff')}")
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
            against=reference_of(fault),
        )
    if not any(case.against for case in cases.values()):
        raise ExperimentError(f"no fault is left to plant: {'; '.join(sorted(whys))}")
    return cases


def reference_of(fault: Fault) -> str:
    """The name of the unsharded case with the numbers of a fault's settings."""
    settings = fault.settings.split(",")
    return next((name for setting, name in REFERENCES.items() if setting in settings), "reference")


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


def change_of(case_name: str) -> str:
    """The changes that plant the mistake of a case, as one diff."""
    return "\n".join(diff.unified() for diff in diffs_of(case_name))


def recorded_change(place: Path) -> str:
    """The diff in the folder of a case; '' for none."""
    path = place / CHANGE
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def grouped(changes: Mapping[str, str]) -> list[str]:
    """Each diff once, below the names of its cases, from the diff of each case."""
    named: dict[str, list[str]] = {}
    for name, change in changes.items():
        named.setdefault(change, []).append(name)
    return [f"{', '.join(names)}:\n{change}" for change, names in named.items() if change]
