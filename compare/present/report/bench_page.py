"""Fill a bench's page: pictures, tables, and how it was run, in one file that fetches nothing."""

from pathlib import Path

from compare.host.disk import write_atomically
from compare.judge.bench import BenchResult
from compare.judge.bench_rows import BenchRow, blocks
from compare.present.bench_words import (
    block_title,
    circumstances_rows,
    in_one_line,
    sentences,
    table_cells,
    told_in,
    warnings,
)
from compare.present.report.pictures import Picture
from compare.present.report.tables import Row, Table, Text
from compare.present.report.template import render_page
from compare.present.tables import by_reason
from compare.spec.experiment import to_toml

PAGE = "bench.html"


def write_bench_page(result: BenchResult, folder: Path) -> Path:
    """Write `folder/bench.html`.

    Args:
        result: with at least one measurement.
        folder: of the bench.

    Returns:
        The page's path.
    """
    found = blocks(result)
    page = render_page(
        "bench.html",
        result=result,
        headline=in_one_line(result),
        sentences=sentences(result),
        warnings=warnings(result),
        left_out=by_reason(result.left_out),
        pictures=_pictures(result, [row for rows in found.values() for row in rows]),
        blocks=[
            (block_title(result, block), _table(block, rows), told_in(rows)) for block, rows in found.items()
        ],
        cases=_case_table(result),
        spec=to_toml(result.experiment),
    )
    write_atomically(folder / PAGE, page.encode())
    return folder / PAGE


def _pictures(result: BenchResult, rows: list[BenchRow]) -> list[Picture]:
    from compare.present.report.bench_figures import before_picture, ratio_picture, step_picture

    compared = [row for row in rows if row.wall_ratio]
    drawn = []
    if compared:
        whiskers = any(row.wall_ratio and row.wall_ratio.has_interval for row in compared)
        drawn.append(
            Picture(
                f"Against {result.baseline}",
                ratio_picture(compared, result.baseline),
                "Medians of the ratios of each round; whiskers are their intervals over rounds."
                if whiskers
                else "Medians of the ratios of each round; too few rounds for intervals.",
            )
        )
    return [
        *drawn,
        Picture(
            "Step time",
            step_picture(rows),
            "Wall time of a step in windows, inside of which nothing waits for it.",
        ),
        Picture(
            "Before the steps",
            before_picture(rows),
            "Apart from the step time: Python, the framework, data and weights; compilation; the first step.",
        ),
    ]


def _table(block: str, rows: list[BenchRow]) -> Table:
    header, cells = table_cells(rows)
    return Table(
        name=block,
        corner=header[0],
        columns=header[1:],
        rows=[Row(Text(row[0]), [Text(cell) for cell in row[1:]]) for row in cells],
    )


def _case_table(result: BenchResult) -> Table:
    return Table(
        name="How each case ran",
        corner="case",
        columns=["gradient synchronisation", "recomputed in backward", "threads", "device", "peak memory is"],
        rows=[
            Row(Text(case.name), [Text(word) for word in words]) for case, words in circumstances_rows(result)
        ],
        look="words",
    )
