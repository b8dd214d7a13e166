"""The benchmark of collectives on stdout: nccl-tests' columns, ways side by side, and the fitted lines."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from compare.contract.collective_bench import IMPLEMENTATIONS, CollectiveRow
from compare.execute.load import is_busy
from compare.judge.collective_fit import Fit
from compare.studies.collectives import CollectiveBench
from compare.terminal.console import coloured, print_json, results_console

COLUMNS = ("size (B)", "count", "type", "way", "time (us)", "algbw (GB/s)", "busbw (GB/s)", "#wrong")
FIT_COLUMNS = ("collective", "ranks", "way", "latency (us)", "bandwidth (GB/s)", "misfit")
ORDER = list(IMPLEMENTATIONS)


def print_bench(bench: CollectiveBench, *, as_json: bool) -> None:
    """Print a table for each collective and number of ranks, the fits, and what is missing."""
    if as_json:
        print_json(bench)
        return
    console = results_console()
    for kind, ranks in groups(bench.rows):
        table = Table(title=f"{kind} on {ranks} ranks", box=SIMPLE_HEAD, padding=0)
        for column in COLUMNS:
            table.add_column(column.replace(" (", "\n("), justify="right")
        for row in rows_of(bench, kind, ranks):
            table.add_row(*(coloured(text, "red") if bad else Text(text) for text, bad in row_cells(row)))
        console.print(table)
    if bench.fits:
        table = Table(title="time = latency + size / bandwidth, fitted", box=SIMPLE_HEAD, padding=0)
        for column in FIT_COLUMNS:
            table.add_column(column, justify="left" if column == "collective" else "right")
        for fit in fits_in_order(bench):
            table.add_row(*fit_cells(fit))
        console.print(table)
    for note in dict.fromkeys(note for side in bench.sides.values() for note in side.notes):
        console.print(note, soft_wrap=True)
    for line in bench.left_out:
        console.print(f"left out: {line}", soft_wrap=True)
    if line := busy_line(bench):
        console.print(line, style="yellow", soft_wrap=True)
    console.print(bench.sentence(), style="bold green" if bench.passed else "bold red", soft_wrap=True)


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


def rows_of(bench: CollectiveBench, kind: str, ranks: int) -> list[CollectiveRow]:
    """The rows of one collective, by size, ways next to each other."""
    mine = [row for row in bench.rows if (row.kind, row.ranks) == (kind, ranks)]
    return sorted(mine, key=lambda row: (row.size, ORDER.index(row.implementation)))


def row_cells(row: CollectiveRow) -> list[tuple[str, bool]]:
    """Texts under `COLUMNS`, and whether each is bad news."""
    what = (f"{row.size:,}", f"{row.count:,}", row.type, row.implementation)
    figures = (f"{row.time_us:,.1f}", f"{row.algbw_gb_s:.3f}", f"{row.busbw_gb_s:.3f}")
    return [*((text, False) for text in (*what, *figures)), (f"{row.wrong:,}", row.wrong > 0)]


def fits_in_order(bench: CollectiveBench) -> list[Fit]:
    """The fits, collective by collective, ways next to each other."""
    return sorted(bench.fits, key=lambda fit: (fit.kind, fit.ranks, ORDER.index(fit.implementation)))


def fit_cells(fit: Fit) -> list[str]:
    """Texts under `FIT_COLUMNS`."""
    bandwidth = f"{fit.bandwidth_gb_s:.3f}" if fit.bandwidth_gb_s else "-"
    what = [fit.kind, str(fit.ranks), fit.implementation]
    return [*what, f"{fit.latency_us:,.1f}", bandwidth, f"{fit.misfit:.0%}"]
