"""`shardpair ledger --chip`: what XLA sends on chips that are not here, next to the textbook."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
from msgspec import Struct

from compare.contract.chips import Chip, ChipProgram, ChipRequest
from compare.contract.communication import Communication
from compare.execute.launch import EnvironmentMissing
from compare.execute.query import query
from compare.judge.textbook import is_flow
from compare.show.findings import NONE, Column, Findings, Row, Table, Text, table_of
from compare.spec.engines.registry import JAX
from compare.spec.experiment import Experiment, ExperimentError, edited
from compare.text import human_bytes, layout_in_words
from compare.theory.communication import role_of, textbook

TIMEOUT_S = 3600.0
NOT_INSTALLED = "is not installed: pip install"
MANUAL = "torch-manual"
MOST = 3
"""Operations of a kind that a cell names."""
SYNTHETIC = {"data": {"source": "synthetic"}}
"""No batch is drawn, so no data are needed."""
BELOW = (
    "Logical bytes and calls of a device in a step, by dtype; of a pipeline, the stage with the most "
    "textbook bytes. torch-manual sends its closed form."
)


class Program(Struct, frozen=True, kw_only=True):
    """A compiled step, with its place in the tables."""

    case: str
    engine: str
    chip: str
    experiment: Experiment
    program: ChipProgram

    @property
    def stage(self) -> int:
        """The stage of a pipeline with the most textbook bytes."""
        stages = range(self.experiment.layout.pp)
        return max(
            stages, key=lambda stage: sum(textbook(self.engine, self.experiment, stage=stage).values())
        )

    @property
    def rows(self) -> list[Communication]:
        """The flows of that stage."""
        return [row for row in self.program.ledger.rows if row.stage == self.stage and is_flow(row)]


class Compiled(Struct, frozen=True, kw_only=True):
    """Programs of the engines for the chips, and the reasons for missing ones."""

    programs: list[Program]
    left_out: dict[str, str] = {}
    """Programs without a compiler."""
    missing: dict[str, str] = {}
    """Programs that a compiler rejected."""


def compile_all(
    cases: Mapping[str, tuple[str, Experiment]],
    chips: Sequence[Chip],
    *,
    python: str,
    cache_dir: str,
    tell: Callable[[str], None],
) -> Compiled:
    """Compile the step of each case, an engine and an experiment, for each chip.

    Raises EnvironmentMissing: no compiler is installed; ExperimentError: the compilers reject all programs.
    """
    programs: list[Program] = []
    left_out, missing = dict[str, str](), dict[str, str]()
    first: Exception | None = None
    for case, (engine, experiment) in cases.items():
        for chip in chips:
            name = f"{case} on {chip.name}"
            tell(f"compiling {name}")
            request = ChipRequest(
                engine=engine, experiment=edited(experiment, SYNTHETIC), chip=chip, cache_dir=cache_dir
            )
            question = ["--compile", msgspec.json.encode(request).decode()]
            try:
                program = query(JAX.name, python, question, answer=ChipProgram, timeout_s=TIMEOUT_S)
            except EnvironmentMissing as error:
                first = first or error
                (left_out if NOT_INSTALLED in str(error) else missing)[name] = str(error)
            except ExperimentError as error:
                first, missing[name] = first or error, str(error)
            else:
                place = {"case": case, "engine": engine, "chip": chip.name, "experiment": experiment}
                programs.append(Program(**place, program=program))
    if first and not programs:
        raise first
    return Compiled(programs=programs, left_out=left_out, missing=missing)


def findings_of_chips(compiled: Compiled, *, places: bool) -> Findings:
    """A table of flows for each case, how they run, and facts of the programs.

    With `places` also every row of each ledger.
    """
    programs = compiled.programs
    cases: dict[str, list[Program]] = {}
    for program in programs:
        cases.setdefault(program.case, []).append(program)
    tables = [table_of_case(case, of_case) for case, of_case in cases.items()]
    tables.append(
        table_of("How they run", MESSAGES, [message for of in programs for message in messages(of)], words=7)
    )
    tables.append(table_of("The programs", PROGRAMS, programs, words=2))
    for one in programs if places else ():
        name = f"{one.case} on {one.chip}: every place"
        tables.append(table_of(name, PLACES, one.program.ledger.rows, words=len(PLACES)))
    unknown = sum(len(one.program.ledger.problems) for one in programs)
    calls, overlapped = Counter[bool](), 0
    for row in (row for one in programs if one.chip != "cpu" for row in one.rows):
        calls[row.is_async] += row.calls
        overlapped += bool(row.overlapped) * row.calls
    asynchronous = f"; without the CPU's, {calls[True]:,} of {calls.total():,} calls are asynchronous, and "
    asynchronous += f"{overlapped:,} are overlapped"
    return Findings(
        study="ledger",
        title="The ledger of chips",
        sentence=f"{len(programs)} programs compiled, and not run{asynchronous if calls else ''}; "
        f"{unknown} instructions not understood"
        + (f"; MISSING: {', '.join(compiled.missing)}" if compiled.missing else ""),
        values={"programs": programs},
        passed=not compiled.missing and not unknown,
        tables=tables,
        missing={name: f"is MISSING: {why}" for name, why in compiled.missing.items()},
        left_out=compiled.left_out,
        warnings=[
            f"{one.case} on {one.chip}: {len(problems)} instructions not understood, and not counted in "
            f"full: {problems[0]}"
            for one in programs
            if (problems := one.program.ledger.problems)
        ],
    )


def table_of_case(case: str, programs: Sequence[Program]) -> Table:
    """The flows of an engine under a layout: the textbook's bytes, torch-manual's, and a column per chip."""
    one = programs[0]
    by_flow: dict[tuple[str, str], dict[str, list[Communication]]] = defaultdict(dict)
    expected, manual = (textbook(name, one.experiment, stage=one.stage) for name in (one.engine, MANUAL))
    for key in (*expected, *manual):
        by_flow[key] = {}
    for program in programs:
        for row in program.rows:
            flow = by_flow[row.axis, role_of(row.kind, row.axis, row.purpose)]
            flow.setdefault(program.chip, []).append(row)
    rows = []
    for (axis, role), by_chip in sorted(by_flow.items()):
        sizes = (book.get((axis, role)) for book in (expected, manual))
        cells = [Text(human_bytes(size) if size else NONE) for size in sizes]
        cells += [Text(sent_in_words(by_chip.get(program.chip, ()))) for program in programs]
        rows.append(Row(Text(axis), [Text(role), *cells]))
    peaks = [Text(human_bytes(program.program.peak_bytes)) for program in programs]
    rows.append(Row(Text("peak memory"), [Text(""), Text(NONE), Text(NONE), *peaks]))
    return Table(
        name=f"{case}: {layout_in_words(one.experiment, '').rpartition(': ')[0]}",
        corner="axis",
        columns=["role", "textbook", MANUAL, *(program.chip for program in programs)],
        rows=rows,
        words=len(programs) + 3,
        below=BELOW,
    )


def sent_in_words(rows: Sequence[Communication]) -> str:
    """Bytes, dtype and calls of rows, as `12.6 MB bf16 in 28 + 524 kB f32 in 2`."""
    sizes, calls = Counter[str](), Counter[str]()
    for row in rows:
        dtype = ", ".join(sorted(row.dtype.split(", ")))
        sizes[dtype] += row.bytes
        calls[dtype] += row.calls
    parts = (f"{human_bytes(size)} {dtype} in {calls[dtype]:,}" for dtype, size in sizes.most_common())
    return " + ".join(parts) or NONE


class Message(Struct, frozen=True, kw_only=True):
    """Calls of one kind in a program that run alike."""

    case: str
    chip: str
    kind: str
    axis: str
    dtype: str
    is_async: bool
    algorithms: str
    overlapped: str
    calls: int
    bytes: int
    cycles: int


def messages(program: Program) -> Iterator[Message]:
    """The calls of a program by kind, axis, dtype, and whether they are asynchronous."""
    groups: dict[tuple[str, str, str, bool], list[Communication]] = {}
    for row in program.rows:
        dtype = ", ".join(sorted(row.dtype.split(", ")))
        groups.setdefault((row.kind, row.axis, dtype, row.is_async), []).append(row)
    for (kind, axis, dtype, is_async), rows in sorted(groups.items()):
        operations = Counter[str]()
        for row in rows:
            for operation in row.overlapped:
                operations[operation] += row.calls
        named = [f"{count:,} {operation}" for operation, count in operations.most_common(MOST)]
        others = operations.total() - sum(count for _, count in operations.most_common(MOST))
        yield Message(
            case=program.case,
            chip=program.chip,
            kind=kind,
            axis=axis,
            dtype=dtype,
            is_async=is_async,
            algorithms=", ".join(sorted({row.algorithm for row in rows} - {""})),
            overlapped=", ".join([*named, *([f"{others:,} others"] if others else [])]),
            calls=sum(row.calls for row in rows),
            bytes=sum(row.bytes for row in rows),
            cycles=sum(row.cycles for row in rows),
        )


MESSAGES = (
    Column[Message]("case", lambda message: message.case),
    Column[Message]("chip", lambda message: message.chip),
    Column[Message]("operation", lambda message: message.kind),
    Column[Message]("axis", lambda message: message.axis),
    Column[Message]("dtype", lambda message: message.dtype),
    Column[Message]("asynchronous", lambda message: "yes" if message.is_async else "no"),
    Column[Message]("overlapped", lambda message: message.overlapped or None),
    Column[Message]("algorithm", lambda message: message.algorithms or None),
    Column[Message]("calls", lambda message: message.calls, ",d"),
    Column[Message]("bytes", lambda message: message.bytes, human_bytes),
    Column[Message]("overlapped cycles", lambda message: message.cycles or None, ",d"),
)
PROGRAMS = (
    Column[Program]("case", lambda one: one.case),
    Column[Program]("chip", lambda one: one.chip),
    Column[Program]("device", lambda one: one.program.device),
    Column[Program]("peak memory", lambda one: one.program.peak_bytes, human_bytes),
    Column[Program]("parameters and moments", lambda one: one.program.state_bytes, human_bytes),
    Column[Program]("compiler (CPU s)", lambda one: one.program.compile_s, ".1f"),
    Column[Program]("from the cache", lambda one: "yes" if one.program.is_cached else "no"),
    Column[Program]("not understood", lambda one: len(one.program.ledger.problems), "d"),
)
WHERE = (
    Column[Communication]("operation", lambda row: row.kind),
    Column[Communication]("axis", lambda row: row.axis),
    Column[Communication]("for", lambda row: row.purpose),
    Column[Communication]("stage", lambda row: str(row.stage)),
    Column[Communication]("phase", lambda row: row.phase),
)
"""The columns that every table of places begins with."""
PLACES = (
    *WHERE,
    Column[Communication]("dtype", lambda row: row.dtype),
    Column[Communication]("calls", lambda row: row.calls, ",d"),
    Column[Communication]("turns", lambda row: " x ".join(map(str, row.loops))),
    Column[Communication]("bytes", lambda row: row.bytes, ",d"),
    Column[Communication]("asynchronous", lambda row: "yes" if row.is_async else "no"),
    Column[Communication]("overlapped", lambda row: ", ".join(row.overlapped) or None),
    Column[Communication]("overlapped cycles", lambda row: row.cycles or None, ",d"),
    Column[Communication]("algorithm", lambda row: row.algorithm or None),
    Column[Communication]("from", lambda row: row.source),
)
