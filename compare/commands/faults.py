"""`shardpair faults`: plant the mistakes that people make, and show which rung of the ladder catches each.

The mistakes are data: `compare/faults.toml`. A wrong value in the spec goes to one engine. A mistake in the
code is a diff: the engine runs a patched copy of its source.
"""

import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from msgspec.structs import replace

from compare.contract.record import Record
from compare.contract.request import Request
from compare.flags import DEVICES, StudiedName, chosen_engines
from compare.judge.outcome import Case, Grid, Outcome
from compare.judge.verdict import TRACED, Verdict
from compare.run.study import OF_LAYOUTS, Study
from compare.setup.planted import ROOT, Diff, Fault, load_faults, patched_copy
from compare.setup.presets import PRESETS, check_names, edits_of, spread
from compare.show.envelope import states_of
from compare.show.findings import Column, Findings, by_reason, table_of, verdict_findings
from compare.spec.engines.registry import ENGINES, REFERENCE
from compare.spec.experiment import Experiment, ExperimentError, edited, revalidate
from compare.terminal import results_console
from compare.text import error_text

SIXTEEN_BITS, UNDROPPED = "precision.dtype=bfloat16", "model.dropout=0.0"
EXPERTS = "model.n_experts=8"
ROPE = f"{SIXTEEN_BITS},model.position=rope,model.norm=rmsnorm,{UNDROPPED}"
REFERENCES = {
    ROPE: "reference-rope-16-bits",
    SIXTEEN_BITS: "reference-16-bits",
    UNDROPPED: "reference-undropped",
    EXPERTS: "reference-experts",
}
"""The references by the settings that change their numbers. The first that fits a fault is its reference."""
FAULTS = load_faults()
DROPOUT = 0.2
"""The dropout of all cases, unless the experiment has its own: without it some mistakes change nothing."""
CHANGE = "planted.diff"
"""The file in the folder of a case with the change of the source."""


class Faults(Study, frozen=True, kw_only=True):
    """Plant each known mistake in each engine. The ladder must fail at the rung that belongs to the mistake.

    Try:
      shardpair faults
      shardpair faults --engines torch-manual --names dropped_all_reduce sum_for_mean
      shardpair faults --names sum_for_mean --dry_run    (print the changed lines)
    """

    engines: tuple[StudiedName, ...] = ()
    """Engines to plant faults in. Default: all."""
    names: tuple[str, ...] = ()
    """Names of the faults. Default: all."""
    devices: int = DEVICES
    """Devices of data parallelism. Faults of other layouts have their own numbers of devices."""
    trace: bool = False
    """Also name the first module whose output or gradient differs, for mistakes in forward or backward."""

    default = "check"
    fixed: ClassVar = {**OF_LAYOUTS, "init_from": None}
    needs_reference = True
    keeps_records = True

    def cases(self, experiment: Experiment) -> Grid:
        """The references, and a case for each fault in each engine. Raises ExperimentError."""
        engines = chosen_engines(self.engines)
        cases = fault_cases(experiment, engines, names=list(self.names), devices=self.devices)
        for diff in itertools.chain.from_iterable(map(diffs_of, cases.values())):
            diff.applied(ROOT)
        return cases, {}

    def launch(self, case: Case, place: Path, **how: Any) -> Record:
        """Run a case; with a mistake in the code, from a patched copy of the source."""
        if not (diffs := diffs_of(case)):
            return super().launch(case, place, **how)
        # All hosts of a run share the run folder: the copy goes there.
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=f"{place.name}.source-") as source:
            packages = {diff.file.partition("/")[0] for diff in diffs}
            patched_copy(Path(source), diffs, packages)
            record = super().launch(case, place, source=Path(source), **how)
        (place / CHANGE).write_text(change_of(case), encoding="utf-8")
        return record

    def needs_trace(self, verdict: Verdict) -> bool:
        """With --trace, for a failure in the first forward or backward."""
        return self.trace and verdict.failure is not None and verdict.failure.rung in TRACED

    def __call__(self) -> int:
        """Run the study; --dry_run also prints the changes. Returns 0 if each fault is caught at its rung."""
        code = super().__call__()
        if self.dry_run and not self.json:
            for line in grouped({name: change_of(case) for name, case in self.plan().cases.items()}):
                results_console().print(f"\n{line}", soft_wrap=True)
        return code

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """Every planted fault, and the rung that caught it; the changes of faults that were not caught."""
        total = sum(bool(case.against) for case in outcome.cases.values())
        rows = rows_of(outcome)
        caught = sum(row.is_right for row in rows)
        wrong = [row.verdict.candidate for row in rows if not row.is_right]
        cases = states_of(outcome)
        for row in rows:  # a case passes if its mistake was caught
            name = row.verdict.candidate
            cases[name] = replace(cases[name], state="passed" if row.is_right else "failed")
        return verdict_findings(
            outcome,
            title="Planted faults",
            sentence=f"{caught} of {total} faults caught at the right rung",
            tables=[table_of("Planted faults, and the rung that caught each", COLUMNS, rows)],
            notes=grouped({name: recorded_change(folder / name) for name in wrong}),
            passed=0 < caught == len(rows),
            cases=cases,
        )

    @classmethod
    def page(cls, outcome: Outcome, folder: Path) -> Findings:
        """The findings, with the changes of all faults."""
        changes = grouped({name: recorded_change(folder / name) for name in outcome.cases})
        return replace(cls.findings(outcome, folder), notes=changes)


class Row(NamedTuple):
    """A planted fault, and the verdict on it."""

    fault: Fault
    engine: str
    verdict: Verdict

    @property
    def is_right(self) -> bool:
        """True if the fault failed first at its own rung."""
        return self.verdict.failure is not None and self.verdict.failure.rung == self.fault.rung


COLUMNS = (
    Column[Row]("fault", lambda row: row.fault.name),
    Column[Row]("engine", lambda row: row.engine),
    Column[Row]("expected rung", lambda row: row.fault.rung),
    Column[Row]("caught at", lambda row: row.verdict.failure.rung if row.verdict.failure else "nothing"),
    Column[Row]("where", lambda row: row.verdict.failure.worst if row.verdict.failure else ""),
    Column[Row]("error", lambda row: error_text(row.verdict.failure.error) if row.verdict.failure else ""),
    Column[Row]("trace", lambda row: row.verdict.trace.sentence() if row.verdict.trace else None),
    Column[Row](
        "",
        lambda row: "ok" if row.is_right else "WRONG",
        news=lambda row: "pass" if row.is_right else "fail",
    ),
)


def rows_of(outcome: Outcome) -> list[Row]:
    """The planted faults that were judged."""
    cases = [(outcome.cases[verdict.candidate], verdict) for verdict in outcome.verdicts]
    return [Row(FAULTS[case.coordinates["fault"]], case.engine, verdict) for case, verdict in cases]


def fault_cases(
    experiment: Experiment, engines: list[str], *, names: list[str], devices: int
) -> dict[str, Case]:
    """The unsharded references, and one case for each fault in each engine that can make it.

    A case has three steps: in the second DDP sends its buckets' order once, which no later step does.
    Raises ExperimentError.
    """
    check_names("--names", "fault", names, FAULTS)
    if devices < 2:
        raise ExperimentError(f"--devices {devices}: most faults show between devices only; give 2 or more")
    dropout = experiment.model.dropout or DROPOUT
    short = edited(experiment, {"train": {"max_iters": 3}, "model": {"dropout": dropout}})
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
            fault=fault.name,
        )
    if not any(case.against for case in cases.values()):
        raise ExperimentError(f"no fault is left to plant: {'; '.join(sorted(whys))}")
    return cases


def reference_of(fault: Fault) -> str:
    """The name of the unsharded case with the numbers of a fault's settings."""
    settings = {*fault.settings.split(",")}
    fits = (name for needed, name in REFERENCES.items() if settings.issuperset(needed.split(",")))
    return next(fits, "reference")


def _case(engine: str, experiment: Experiment, *, against: str = "", **coordinates: str) -> Case:
    request = Request(engine=engine, experiment=experiment, ladder=True)
    return Case(request=request, coordinates=coordinates, against=against, same_training=False)


def diffs_of(case: Case) -> list[Diff]:
    """The changes that plant the mistake of a case; none for a reference."""
    name = case.coordinates.get("fault")
    return FAULTS[name].diffs(case.engine) if name else []


def change_of(case: Case) -> str:
    """The changes that plant the mistake of a case, as one diff; '' for a reference."""
    return "\n".join(diff.unified() for diff in diffs_of(case))


def recorded_change(place: Path) -> str:
    """The diff in the folder of a case; '' for none."""
    path = place / CHANGE
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def grouped(changes: Mapping[str, str]) -> list[str]:
    """Each diff once, below the names of its cases, from the diff of each case."""
    return [f"{', '.join(names)}:\n{change}" for change, names in by_reason(changes).items() if change]
