"""Ledgers beside their closed forms, on stdout and as Markdown: unmatched lines first."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.table import Table
from rich.text import Text

from compare.contract.record import read_record
from compare.judge.known_deviations import PATTERNS
from compare.judge.ledger_lines import ORDER, Line
from compare.present.tables import by_reason
from compare.spec.engines.registry import ENGINES
from compare.studies.ledgers import EngineLedger, LedgerStudy
from compare.terminal.console import coloured, results_console
from compare.terminal.layout_words import layout_in_words

NONE, AS_EXPECTED = "\N{EN DASH}", "="
PREAMBLE = """Written by `make ledger`, not by hand: what each engine sends in one step of `check`, in
float64, beside the closed form of its layout (`compare/judge/closed_forms/communication.py`). Logical bytes
of a device: those of the full tensors, and of a pipeline by stage. = is the closed form to the byte, a dash
nothing, as expected. Where the two frameworks' own ways differ, so does the closed form: JAX's /
PyTorch's. A pattern explains a figure only if it gives its bytes, at any size of the model; a figure that
none explains is marked unexplained, with the version that it was seen in (`compare/judge/unexplained.json`).
Numbers that go alone, such as the loss, are left out. One step is watched, the third of a run: of the others
this says nothing."""
ROW_COLUMNS = (
    "operation",
    "axis",
    "for",
    "stage",
    "phase",
    "ranks",
    "dtype",
    "calls",
    "turns",
    "bytes",
    "from",
)

Key = tuple[str, str, str]


class Row(Struct, frozen=True, kw_only=True):
    """One line of all engines under one layout."""

    key: Key
    """Operation, axis, purpose."""
    stages: tuple[int, ...]
    """Ranks of the pipeline that are alike in it."""
    lines: dict[str, Line]
    """By engine; those that neither expect nor send anything are missing."""

    @property
    def rank(self) -> tuple:
        """New differences come first, then those that nothing explains."""
        states = [ORDER.index(line.state) for line in self.lines.values()]
        lines = self.lines.values()
        known = not any(line.is_new for line in lines), all(line.is_explained for line in lines)
        return *known, min(states), self.stages, self.key


def layouts_of(ledgers: Sequence[EngineLedger]) -> list[list[EngineLedger]]:
    """Ledgers by layout, in order: those of one stand side by side, each engine once."""
    groups: dict[tuple[str, int], list[EngineLedger]] = {}
    times: Counter[tuple[str, str]] = Counter()
    for ledger in ledgers:
        words = layout_in_words(ledger.experiment, "cpu")
        groups.setdefault((words, times[words, ledger.engine]), []).append(ledger)
        times[words, ledger.engine] += 1
    return list(groups.values())


def rows_of(ledgers: Sequence[EngineLedger]) -> list[Row]:
    """The lines of one layout's engines side by side."""
    found: dict[tuple[Key, int], dict[str, Line]] = {}
    for ledger in ledgers:
        for line in ledger.lines:
            at = (line.kind, line.axis, line.purpose), line.stage
            found.setdefault(at, {})[ledger.engine] = msgspec.structs.replace(line, stage=0)
    alike: dict[tuple[Key, tuple], list[int]] = {}
    for (key, stage), lines in found.items():
        alike.setdefault((key, tuple(sorted(lines.items(), key=lambda item: item[0]))), []).append(stage)
    rows = [
        Row(key=key, stages=tuple(sorted(stages)), lines=dict(lines))
        for (key, lines), stages in alike.items()
    ]
    return sorted(rows, key=lambda row: row.rank)


def print_ledgers(found: LedgerStudy, folder: Path) -> None:
    """A table for each layout, then what explains its lines, who has none, and a sentence."""
    console = results_console()
    for of_layout in layouts_of(found.ledgers):
        engines = [ledger.engine for ledger in of_layout]
        table = Table(title=layout_in_words(of_layout[0].experiment, "cpu"), title_justify="left")
        for column in (*_columns(of_layout), *engines):
            table.add_column(column, justify="right" if column in ("closed form", *engines) else "left")
        for row in rows_of(of_layout):
            table.add_row(*_head(row, of_layout), *(_coloured(row.lines.get(engine)) for engine in engines))
        console.print(table)
        for ledger in of_layout:
            for problem in ledger.problems:
                console.print(f"{ledger.engine} is incomplete: {problem}", style="red", soft_wrap=True)
    for name in used(found.ledgers):
        console.print(f"{name}: {PATTERNS[name]}", soft_wrap=True)
    for why, names in by_reason(found.left_out).items():
        console.print(f"left out: {', '.join(names)}: {why}", soft_wrap=True)
    for name, why in found.missing.items():
        console.print(f"MISSING: {name}: {why}", style="red", soft_wrap=True)
    console.print(found.sentence(), style="bold green" if found.passed else "bold red", soft_wrap=True)
    console.print(f"records: {folder}", soft_wrap=True)


def print_rows(ledgers: Sequence[EngineLedger], folder: Path) -> None:
    """Every row of every ledger, with its place in the program."""
    console = results_console()
    for ledger in ledgers:
        table = Table(title=f"{ledger.case}: every place", title_justify="left")
        for column in ROW_COLUMNS:
            table.add_column(column, overflow="fold")
        for row in read_record(folder / ledger.case).ledger.rows:
            numbers = f"{row.calls:,}", " x ".join(map(str, row.loops)), f"{row.bytes:,}"
            words = row.kind, row.axis, row.purpose, str(row.stage), row.phase, str(row.group_size), row.dtype
            table.add_row(*words, *numbers, row.source)
        console.print(table)


def used(ledgers: Iterable[EngineLedger]) -> list[str]:
    """The patterns that explain some line, in the order in which they are known."""
    found = {name for ledger in ledgers for line in ledger.lines for name in line.why.split(", ")}
    return [name for name in PATTERNS if name in found]


def page(found: LedgerStudy) -> str:
    """A Markdown page: a table for each layout, the patterns that explain some of its lines, and who has
    none."""
    parts = ["# The ledger", "", PREAMBLE, "", f"{found.sentence()}. {found.versions}."]
    if found.missing:
        parts += ["", "## Missing", "", *(f"- **{name}**: {why}" for name, why in found.missing.items())]
    parts += ["", "## Known patterns", ""]
    parts += [f"- **{name}**: {PATTERNS[name]}" for name in used(found.ledgers)]
    for of_layout in layouts_of(found.ledgers):
        words = layout_in_words(of_layout[0].experiment, "cpu")
        engines = [ledger.engine for ledger in of_layout]
        columns = (*_columns(of_layout), *engines)
        marks = ["---:" if column in ("closed form", *engines) else "---" for column in columns]
        parts += ["", f"## {words[0].upper()}{words[1:]}", ""]
        parts += [f"| {' | '.join(columns)} |", f"| {' | '.join(marks)} |"]
        for row in rows_of(of_layout):
            cells = (_text(row.lines.get(engine)) for engine in engines)
            parts.append(f"| {' | '.join((*_head(row, of_layout), *cells))} |")
        for ledger in of_layout:
            parts += [f"\n{ledger.engine} is incomplete: {problem}." for problem in ledger.problems]
    if found.left_out:
        left_out = by_reason(found.left_out).items()
        parts += ["", "## Left out", "", *(f"- {', '.join(names)}: {why}." for why, names in left_out)]
    return "\n".join(parts) + "\n"


def _columns(ledgers: Sequence[EngineLedger]) -> tuple[str, ...]:
    stage = ("stage",) if ledgers[0].experiment.layout.pp > 1 else ()
    return "operation", "axis", "for", *stage, "closed form"


def _head(row: Row, ledgers: Sequence[EngineLedger]) -> tuple[str, ...]:
    pp = ledgers[0].experiment.layout.pp
    stages = "all" if len(row.stages) == pp else ", ".join(map(str, row.stages))
    by_side = {ENGINES[engine].side: line.expected for engine, line in sorted(row.lines.items())}
    expected = " / ".join(dict.fromkeys(f"{size:,.0f}" if size else NONE for size in by_side.values()))
    return *row.key, *((stages,) if pp > 1 else ()), expected


def _text(line: Line | None) -> str:
    """One engine's cell."""
    if line is None:
        return NONE
    if line.state == "expected":
        return AS_EXPECTED
    found = f"{line.found:,}" if line.found else "nothing"
    return f"**{found}**" if line.is_new else f"{found}: {line.why or unexplained(line)}"


def unexplained(line: Line) -> str:
    """Of a difference that was seen before, and in which version; of a new one `not seen before`."""
    return f"unexplained ({line.seen or 'not seen before'})"


def _coloured(line: Line | None) -> Text:
    if line is None or line.state == "expected":
        return coloured(_text(line), "green")
    return coloured(_text(line).strip("*"), "red" if line.is_new else "yellow" if line.why else "magenta")
