"""The benchmark of collectives on stdout: nccl-tests' columns, ways side by side, and the fitted lines."""

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from compare.contract.collective_bench import IMPLEMENTATIONS, CollectiveRow
from compare.execute.load import is_busy
from compare.judge.collective_fit import Fit
from compare.studies.collectives import CollectiveBench
from compare.terminal.console import coloured, print_json, results_console

COLUMNS = ("time (us)", "algbw (GB/s)", "busbw (GB/s)", "#wrong")
FIT_COLUMNS = ("latency (us)", "bandwidth (GB/s)", "misfit")
ORDER = list(IMPLEMENTATIONS)
Cells = list[tuple[str, bool]]
"""Texts, and whether each is bad news."""


def print_bench(bench: CollectiveBench, page: Path, *, as_json: bool) -> None:
    """Print a table for each collective and number of ranks, the fits, and what is missing."""
    if as_json:
        print_json(bench)
        return
    console = results_console()
    for kind, ranks in groups(bench.rows):
        table = Table(title=f"{kind} on {ranks} ranks", box=SIMPLE_HEAD, padding=0)
        for column in ("size (B)", "count", "type", "way", *COLUMNS):
            table.add_column(column.replace(" (", "\n("), justify="right")
        mine = [row for row in bench.rows if (row.kind, row.ranks) == (kind, ranks)]
        for row in sorted(mine, key=lambda row: (row.size, ORDER.index(row.implementation))):
            cells = (coloured(text, "red") if bad else Text(text) for text, bad in _cells(row))
            table.add_row(f"{row.size:,}", f"{row.count:,}", row.type, row.implementation, *cells)
        console.print(table)
    if bench.fits:
        table = Table(title="time = latency + size / bandwidth, fitted", box=SIMPLE_HEAD, padding=0)
        for column in ("collective", "ranks", "way", *FIT_COLUMNS):
            table.add_column(column, justify="left" if column == "collective" else "right")
        for fit in sorted(bench.fits, key=lambda fit: (fit.kind, fit.ranks, ORDER.index(fit.implementation))):
            table.add_row(fit.kind, str(fit.ranks), fit.implementation, *_fit_cells(fit))
        console.print(table)
    for note in dict.fromkeys(note for side in bench.sides.values() for note in side.notes):
        console.print(note, soft_wrap=True)
    for line in bench.left_out:
        console.print(f"left out: {line}", soft_wrap=True)
    if line := busy_line(bench):
        console.print(line, style="yellow", soft_wrap=True)
    console.print(bench.sentence(), style="bold green" if bench.passed else "bold red", soft_wrap=True)
    console.print(f"results: {page}", soft_wrap=True)


def busy_line(bench: CollectiveBench) -> str:
    """A line that says so if the machine was busy; else ''."""
    if not is_busy(bench.busy_cores):
        return ""
    return f"other processes used {bench.busy_cores:.1f} cores when the first row was timed: no time holds"


def groups(rows: Sequence[CollectiveRow]) -> list[tuple[str, int]]:
    """Collectives and numbers of ranks that there are, collective by collective."""
    kinds: list[str] = list(dict.fromkeys(row.kind for row in rows))
    return sorted({(row.kind, row.ranks) for row in rows}, key=lambda one: (kinds.index(one[0]), one[1]))


def ways(rows: Sequence[CollectiveRow]) -> list[str]:
    """Implementations that there are, in their declared order."""
    return [name for name in IMPLEMENTATIONS if any(row.implementation == name for row in rows)]


def side_by_side(rows: Sequence[CollectiveRow], kind: str, ranks: int) -> tuple[list[str], list[Cells]]:
    """The rows of one collective, a line for each size: the names of the ways, and the cells."""
    mine = [row for row in rows if (row.kind, row.ranks) == (kind, ranks)]
    names = ways(mine)
    lines = []
    for size in sorted({row.size for row in mine}):
        by_way = {row.implementation: row for row in mine if row.size == size}
        any_row = next(iter(by_way.values()))
        cells = [(f"{size:,}", False), (f"{any_row.count:,}", False), (any_row.type, False)]
        for name in names:
            cells += _cells(by_way[name]) if name in by_way else [("-", False)] * len(COLUMNS)
        lines.append(cells)
    return names, lines


def _cells(row: CollectiveRow) -> Cells:
    figures = (f"{row.time_us:,.1f}", f"{row.algbw_gb_s:.3f}", f"{row.busbw_gb_s:.3f}")
    return [*((text, False) for text in figures), (f"{row.wrong:,}", row.wrong > 0)]


def fit_rows(fits: Sequence[Fit]) -> tuple[list[str], list[list[str]]]:
    """The fits, a line for each collective and number of ranks: the names of the ways, and the cells."""
    names = [name for name in IMPLEMENTATIONS if any(fit.implementation == name for fit in fits)]
    kinds = list(dict.fromkeys(fit.kind for fit in fits))
    lines = []
    for kind, ranks in sorted({(f.kind, f.ranks) for f in fits}, key=lambda k: (kinds.index(k[0]), k[1])):
        by_way = {fit.implementation: fit for fit in fits if (fit.kind, fit.ranks) == (kind, ranks)}
        cells = [kind, str(ranks)]
        for name in names:
            cells += _fit_cells(by_way[name]) if name in by_way else ["-"] * len(FIT_COLUMNS)
        lines.append(cells)
    return names, lines


def _fit_cells(fit: Fit) -> list[str]:
    bandwidth = f"{fit.bandwidth_gb_s:.3f}" if fit.bandwidth_gb_s else "-"
    return [f"{fit.latency_us:,.1f}", bandwidth, f"{fit.misfit:.0%}"]
