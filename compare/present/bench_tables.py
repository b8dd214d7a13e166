"""A bench on stdout: a table for each block, what must be known to read it; or JSON."""

from rich.box import SIMPLE_HEAD
from rich.table import Table

from compare.judge.bench import BenchResult
from compare.judge.bench_rows import BenchRow, blocks
from compare.present.bench_words import block_title, sentences, table_cells, told_in, warnings
from compare.present.tables import by_reason
from compare.terminal.console import print_json, results_console


def print_bench(result: BenchResult, *, as_json: bool) -> None:
    """Print what `shardpair bench` says.

    Args:
        result: finished, or what there is of it.
        as_json: one JSON object instead: `rows` by block, and the whole `result`.
    """
    found = blocks(result)
    if as_json:
        print_json({"rows": found, "warnings": warnings(result), "result": result})
        return
    console = results_console()
    for block, rows in found.items():
        console.print(block_table(result, block, rows))
        if told := told_in(rows):
            console.print(told, soft_wrap=True)
    for line in sentences(result) if found else ():
        console.print(line, soft_wrap=True)
    for why, names in by_reason(result.left_out).items():
        console.print(f"left out: {', '.join(names)}: {why}", style="yellow", soft_wrap=True)
    for line in warnings(result):
        console.print(line, style="red", soft_wrap=True)
    if not found:
        console.print("nothing was measured", style="bold red")


def block_table(result: BenchResult, block: str, rows: list[BenchRow]) -> Table:
    """Cases that do the same work, a row each."""
    header, cells = table_cells(rows)
    title = block_title(result, block)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in header:
        table.add_column(name, justify="left" if name == header[0] else "right", no_wrap="ratio" in name)
    for row in cells:
        table.add_row(*row)
    return table
