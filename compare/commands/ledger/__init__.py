"""`shardpair ledger`: the bytes that every engine sends in a step, and the textbook's."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import tyro
from msgspec import Struct
from msgspec.structs import replace

from compare.commands.ledger.chips import WHERE, compile_all, findings_of_chips
from compare.contract.communication import Communication
from compare.contract.record import Record
from compare.flags import PresetNames, chosen_engines, find_pythons
from compare.judge.alone import Alone
from compare.judge.outcome import Grid, Outcome, read_run
from compare.judge.strategy import LEDGER, SENT
from compare.judge.textbook import Flow, line_up
from compare.run.spread import Spread
from compare.run.study import Study
from compare.setup.chips import chips_of, require_chip
from compare.setup.grid import grid, vary
from compare.setup.presets import check_presets, several_presets
from compare.show.envelope import states_of
from compare.show.findings import NONE, Column, Findings, Row, Table, Text, table_of
from compare.show.terminal import print_findings
from compare.spec.engines.registry import JAX, STUDIED
from compare.spec.experiment import Experiment, ExperimentError
from compare.terminal import errors_console
from compare.text import layout_in_words


class Ledger(Spread, frozen=True, kw_only=True):
    """Compare what each engine sends in a step with the textbook of the layout.

    Each engine trains four steps, and the third is recorded. Logical bytes are those of the full tensors, by
    kind, mesh axis and purpose, on a device of each stage of a pipeline. Scalars (the loss, the norm) are
    left out. For a function or a module of your own see docs/libraries.md.

    With --chip nothing is trained: XLA's compilers for CPUs, TPUs and GPUs compile the step of each JAX
    engine. The tables have a column per chip, and say which messages are asynchronous.

    Try:
      shardpair ledger --preset fsdp --devices 2
      shardpair ledger demo --preset fsdp --chip v5e:2x4 --chip h100x8 --chip cpu
      shardpair ledger --preset tp --rows                   (every place in the program, with its source line)
      shardpair ledger --results runs/demo-20260101-120000  (of a finished run)
    """

    presets: PresetNames = ()
    results: Path | None = None
    """Folder of a finished run or check whose ledgers are shown; nothing is trained."""
    rows: bool = False
    """Also print every row: phase, ranks, dtype, loops and source line."""
    fail_on_unexpected: bool = False
    """Exit with 1 if the layout does not explain a flow, or an instruction for a chip is not understood."""
    chip: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Chip that need not be here: cpu, a slice of a TPU such as v5e:2x4, or GPUs such as h100x8. Give the
    flag for each chip. The default of --devices is its number of devices."""

    default = "check"
    # The third of four steps is watched.
    fixed: ClassVar = {"train.max_iters": 4, "train.eval_interval": 0, "checkpoint.every": 0}
    keeps_records = True

    def resolve(self) -> Experiment:
        """The experiment; --presets replace its layout. Raises ExperimentError."""
        return Study.resolve(self) if self.presets else super().resolve()

    def cases(self, experiment: Experiment) -> Grid:
        """Every engine that can express the layout, or each layout. Raises ExperimentError."""
        if not self.presets:
            return self.against_first(experiment)
        if self.preset:
            raise ExperimentError("--preset and --presets: give one of them")
        presets = several_presets(self.presets, experiment.model, self.devices)
        check_presets(experiment.layout, presets.items(), self.layout_flags)
        layouts = {name: (name, devices) for name, devices in presets.items()}
        rows, _ = vary(experiment, layouts, (), flags=self.layout_flags)
        return grid(chosen_engines(self.engines), rows, as_presets="schedule" not in self.layout_flags)

    def __call__(self) -> int:
        """Print the ledgers. Returns 0, or 1 if an engine failed or --fail_on_unexpected found something."""
        if self.chip:
            return self.of_chips()
        if self.dry_run:
            return super().__call__()
        if self.results and (self.preset or self.presets or self.fields_given):
            raise ExperimentError(
                f"--results {self.results} is of a finished run: leave out the layout and the experiment"
            )
        found = findings_of_ledgers(self.results or self.run()[1], places=self.rows)
        print_findings(found, as_json=self.json)
        return 1 if found.missing or (self.fail_on_unexpected and not found.passed) else 0

    def of_chips(self) -> int:
        """Print the ledgers of compiled programs. Returns 0, or 1 if a compiler rejects a program, or
        --fail_on_unexpected and an instruction is not understood."""
        if idle := sorted(self.given - self.fields_given - WITH_CHIP):
            flags = ", ".join(f"--{name}" for name in idle)
            raise ExperimentError(f"--chip compiles programs and trains nothing: leave out {flags}")
        if others := [name for name in self.engines if name not in JAX_ENGINES]:
            raise ExperimentError(f"--engines {others[0]}: --chip takes {', '.join(JAX_ENGINES)}")
        chips, count = chips_of(self.chip)
        study = replace(self, platform="gpu" if any(chip.compiler == "cuda" for chip in chips) else "cpu")
        if count and self.devices is None and (self.preset or self.presets):
            study = replace(study, devices=count)
        planned = study.plan()
        cases = {
            name: (case.engine, case.experiment)
            for name, case in planned.cases.items()
            if case.engine in JAX_ENGINES
        }
        for chip, (_, experiment) in itertools.product(chips, cases.values()):
            require_chip(chip, experiment)
        if self.dry_run:
            names = [f"{case} on {chip.name}" for case, chip in itertools.product(cases, chips)]
            found = Findings(
                study="ledger",
                is_dry_run=True,
                title="dry run",
                sentence=f"dry run: {len(names)} programs; nothing was compiled",
                passed=True,
                notes=names,
                values={"programs": []},
            )
            print_findings(found, as_json=self.json)
            return 0
        compiled = compile_all(
            cases,
            chips,
            python=find_pythons(self)[JAX.name],
            cache_dir=self.cache_dir,
            tell=(lambda _: None) if self.quiet else errors_console().print,
        )
        ours = {name: why for name, why in planned.left_out.items() if name.partition(".")[0] in JAX_ENGINES}
        compiled = replace(compiled, left_out=ours | compiled.left_out)
        findings = findings_of_chips(compiled, places=self.rows)
        print_findings(findings, as_json=self.json)
        return 1 if findings.missing or (self.fail_on_unexpected and not findings.passed) else 0

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """A table for each layout, and the unexpected flows."""
        return findings_of_ledgers(folder, places=False)


WITH_CHIP = {
    *("chip", "engines", "preset", "presets", "devices", "rows", "fail_on_unexpected"),
    *("json", "quiet", "jax_python", "cache_dir", "dry_run"),
}
"""Flags allowed with --chip, with the fields of the experiment."""
JAX_ENGINES = [engine.name for engine in JAX.engines]
PEER = "peers have no closed form of what they send"
BELOW = "Bytes of a device in a step, all calls together. A cell is a multiple of the textbook's bytes."
PLACES = (
    *WHERE,
    Column[Communication]("ranks", lambda row: str(row.group_size)),
    Column[Communication]("dtype", lambda row: row.dtype),
    Column[Communication]("calls", lambda row: row.calls, ",d"),
    Column[Communication]("turns", lambda row: " x ".join(map(str, row.loops))),
    Column[Communication]("bytes", lambda row: row.bytes, ",d"),
    Column[Communication]("from", lambda row: row.source),
)


class EngineLedger(Struct, frozen=True, kw_only=True):
    """Messages of one engine under one layout, with the textbook's."""

    case: str
    engine: str
    experiment: Experiment
    platform: str
    flows: list[Flow] = []
    unexpected: list[str] = []
    """Messages that could not be read, or that the layout does not explain."""
    uncompared: str = ""
    """Why the flows were not judged; "" if they were."""


def engine_ledger(case: str, record: Record, alone: Alone | None = None) -> EngineLedger:
    """A record's flows with the textbook's, and the judgement of its bytes. Peers have no flows."""
    manifest, alone = record.manifest, alone or Alone(uncompared={SENT: "the record was never judged"})
    engine, experiment = manifest.engine, manifest.experiment
    return EngineLedger(
        case=case,
        engine=engine,
        experiment=experiment,
        platform=manifest.platform,
        flows=line_up(engine, experiment, record.ledger.rows) if engine in STUDIED else [],
        unexpected=[alone.strategy[key] for key in (LEDGER, SENT) if key in alone.strategy],
        uncompared=alone.uncompared.get(SENT, ""),
    )


def engine_ledgers(outcome: Outcome, records: Mapping[str, Record]) -> list[EngineLedger]:
    """The ledgers of a study's records."""
    return [engine_ledger(name, record, outcome.alone.get(name)) for name, record in records.items()]


def layouts_of(ledgers: Sequence[EngineLedger]) -> list[list[EngineLedger]]:
    """Ledgers by layout, in order, each engine once: a second ledger of an engine starts another group."""
    groups: dict[tuple[str, int], list[EngineLedger]] = {}
    for ledger in ledgers:
        words, copy = layout_in_words(ledger.experiment, ledger.platform), 0
        while any(ledger.engine == one.engine for one in groups.get((words, copy), ())):
            copy += 1
        groups.setdefault((words, copy), []).append(ledger)
    return list(groups.values())


def table_of_layout(ledgers: Sequence[EngineLedger]) -> Table:
    """The flows of one layout: the textbook's bytes, and each engine's as a multiple."""
    pp = ledgers[0].experiment.layout.pp
    flows: dict[tuple[str, str, int], dict[str, Flow]] = {}
    for ledger in ledgers:
        for flow in ledger.flows:
            flows.setdefault((flow.axis, flow.role, flow.stage), {})[ledger.engine] = flow
    rows = []
    for (axis, role, stage), by_engine in sorted(flows.items()):
        sizes = dict.fromkeys(
            f"{flow.textbook:,.0f}" if flow.textbook else NONE for flow in by_engine.values()
        )
        words = [role, *([str(stage)] if pp > 1 else []), " / ".join(sizes)]
        cells = (_cell(by_engine.get(ledger.engine)) for ledger in ledgers)
        rows.append(Row(Text(axis), [*map(Text, words), *cells]))
    columns = ["role", *(["stage"] if pp > 1 else [])]
    return Table(
        name=f"Beside the textbook: {layout_in_words(ledgers[0].experiment, ledgers[0].platform)}",
        corner="axis",
        columns=[*columns, "textbook", *(ledger.engine for ledger in ledgers)],
        rows=rows,
        words=len(columns),
        below=BELOW,
    )


def _cell(flow: Flow | None) -> Text:
    if flow is None or not (flow.sent or flow.textbook):
        return Text(NONE)
    return Text(f"{flow.sent:,}" if flow.ratio is None else f"{flow.ratio:.2f}")


def findings_of_ledgers(folder: Path, *, places: bool) -> Findings:
    """A table for each layout, with unexpected flows as warnings.

    With `places` also every row of each ledger. Raises RecordError.
    """
    outcome, records = read_run(folder)
    peers = {name: PEER for name, record in records.items() if record.manifest.engine not in STUDIED}
    ledgers = engine_ledgers(outcome, {name: records[name] for name in records if name not in peers})
    tables = [*map(table_of_layout, layouts_of(ledgers))]
    for ledger in ledgers if places else ():
        rows = records[ledger.case].ledger.rows
        tables.append(table_of(f"{ledger.case}: every place", PLACES, rows, words=len(PLACES)))
    missing, left_out = outcome.undone, outcome.left_out | peers
    return Findings(
        study="ledger",
        title="The ledger",
        sentence=sentence(ledgers, missing),
        folder=str(folder),
        cases=states_of(outcome),
        values={"ledgers": ledgers, "outcome": outcome},
        passed=not missing and not any(ledger.unexpected for ledger in ledgers),
        tables=tables,
        notes=[
            *(
                f"{ledger.case} was not judged: {ledger.uncompared}"
                for ledger in ledgers
                if ledger.uncompared
            ),
            f"records: {folder}",
        ],
        missing={name: f"is MISSING: it {why}" for name, why in missing.items()},
        left_out=left_out,
        warnings=[f"{ledger.case}: {line}" for ledger in ledgers for line in ledger.unexpected],
    )


def sentence(ledgers: Sequence[EngineLedger], missing: Collection[str]) -> str:
    """How far the cases are from the textbook, and which are unexpected, missing or not judged."""
    ratios = [flow.ratio for ledger in ledgers for flow in ledger.flows if flow.ratio is not None]
    exact = sum(flow.sent == flow.textbook for ledger in ledgers for flow in ledger.flows)
    least, most = min(ratios, default=1.0), max(ratios, default=1.0)
    far = f", the others {least:.2f} to {most:.2f} times (docs/compilers.md)" if exact < len(ratios) else ""
    unexpected = ", ".join(ledger.case for ledger in ledgers if ledger.unexpected)
    uncompared = ", ".join(ledger.case for ledger in ledgers if ledger.uncompared)
    parts = {
        f"{len(ledgers)} case{'s' * (len(ledgers) != 1)}": True,
        f"{exact} of {len(ratios)} flows are the textbook's to the byte{far}": ratios,
        f"UNEXPECTED: {unexpected}": unexpected,
        f"not judged: {uncompared}": uncompared,
        f"MISSING: {', '.join(missing)}": missing,
    }
    return "; ".join(part for part, is_shown in parts.items() if is_shown)
